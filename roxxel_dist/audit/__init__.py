"""Whether a run is what it says: its steps done again, and two runs compared by their running digests."""
