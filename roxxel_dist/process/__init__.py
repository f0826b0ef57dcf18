"""What a process needs of the system, with the standard library alone: locks, files that last, signals, exit codes."""
