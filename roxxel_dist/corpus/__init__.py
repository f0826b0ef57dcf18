"""Text and tokens into shards."""
