"""Trained weights: files of them, and the models that they make."""
