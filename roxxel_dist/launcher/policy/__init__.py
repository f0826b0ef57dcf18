"""What failures mean, and what follows from them. Pure functions."""
