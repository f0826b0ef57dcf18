"""Many runs: a search space, an engine that asks for trials, and the record of what they gave."""
