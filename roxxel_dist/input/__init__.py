"""What a process reads for its own devices."""
