"""Where a run's numbers go, a file each."""
