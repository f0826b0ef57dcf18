"""Who gets the next steps: early stopping."""
