"""Audit of runs: replay of steps, and comparison of two runs by their digest chains."""
