"""The update of a step with virtual shards, by blocks of the large parameters."""
