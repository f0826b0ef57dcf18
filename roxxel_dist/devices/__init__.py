"""Kinds of accelerators: what they can do, what a program costs on them, and whether one of them works."""
