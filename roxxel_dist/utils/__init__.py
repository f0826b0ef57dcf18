"""Helpers that every room needs and none owns."""
