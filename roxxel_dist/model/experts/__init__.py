"""Mixtures of experts, and the products of their matrices."""
