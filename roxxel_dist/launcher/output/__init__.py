"""What ranks print: a log file each, and the console."""
