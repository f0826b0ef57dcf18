"""Preflight: what the hosts say of themselves before a job starts, and checks of it."""
