"""One trial, where it runs."""
