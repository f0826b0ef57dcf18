"""Validation: its rows, its losses, and the scores of its tasks."""
