"""All settings of a run."""
