"""The rows that each step trains on: pure integers, no files, no jax."""
