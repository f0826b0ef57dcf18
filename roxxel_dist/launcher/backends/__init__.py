"""Where ranks can run, a file each."""
