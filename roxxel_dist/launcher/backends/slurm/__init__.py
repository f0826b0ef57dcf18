"""SLURM: a job inside an allocation, the script that asks for one, and the queue."""
