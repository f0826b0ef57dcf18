"""What a run would be, before it is launched."""
