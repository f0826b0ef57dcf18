"""W&B: programs that log to it, files of its runs, sweeps that its server leads."""
