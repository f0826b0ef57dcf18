"""Kubernetes: a JobSet, and what each of its pods runs (as each machine of a compose file may)."""
