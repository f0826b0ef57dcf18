"""The only code that knows that there are other processes."""
