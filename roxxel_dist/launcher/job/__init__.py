"""A job: its options, its ranks and their environment; where they can run."""
