"""The largest numbers that settings may have."""

MOST_WHOLE = 2**31 - 1
"""Of steps, rows, tokens and sizes: arrays on devices count in int32."""
