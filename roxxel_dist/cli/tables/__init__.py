"""What commands print as tables."""
