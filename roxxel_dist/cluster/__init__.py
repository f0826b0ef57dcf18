"""What one process knows of the others of its job, of its machine and of what a launcher and its ranks agree on."""
