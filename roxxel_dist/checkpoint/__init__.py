"""Checkpoints: files, the store of all ranks, and what decides when to save."""
