"""What a sweep varies: W&B's file, distributions, constraints."""
