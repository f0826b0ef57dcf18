"""A run of a Config, from folder to folder."""
