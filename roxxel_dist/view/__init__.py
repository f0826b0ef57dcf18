"""What is on disk of a run, a study and a job, read while they live and shown in a terminal. Nothing is written."""
