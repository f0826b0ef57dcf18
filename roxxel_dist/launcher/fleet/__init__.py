"""The hosts of a job: the state of each, and what follows from an event."""
