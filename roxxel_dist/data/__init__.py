"""Tokens on disk."""
