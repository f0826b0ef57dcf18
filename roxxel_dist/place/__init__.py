"""Where a run lies: its folder, on a disk or in a bucket."""
