"""What the controller decides: attempts, hangs, outcomes, restarts, and what it reports."""
