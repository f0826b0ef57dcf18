"""A trial as a Ray task."""
