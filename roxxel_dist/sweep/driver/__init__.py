"""The process that drives a study: it proposes, starts and stops trials."""
