"""Runs, studies and jobs, read from disk while they are active and shown in a terminal. Nothing is written."""
