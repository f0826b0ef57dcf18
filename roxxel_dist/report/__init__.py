"""Runs side by side: what is in their folders, as a table, as JSON and as pictures. No jax."""
