"""Where rows of metrics go: one file a logger."""
