"""The parts of a sweep that vary: W&B's file, distributions, constraints."""
