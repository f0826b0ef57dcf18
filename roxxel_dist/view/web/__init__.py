"""The page of runs, studies and jobs: live from a server on the loopback, or as one file."""
