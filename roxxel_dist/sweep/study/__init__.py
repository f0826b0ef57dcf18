"""A study: its folder and its journal."""
