"""One run: the loop, its step, its checkpoints and its log."""
