"""The agent of a host: it starts its ranks, watches them, and ends them."""
