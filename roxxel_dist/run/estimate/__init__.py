"""The plan of a run: what it takes here, or on a target that is not here."""
