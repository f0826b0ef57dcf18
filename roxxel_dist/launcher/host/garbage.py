"""How often Python looks for garbage."""

import gc


def collect_seldom() -> None:
    """Look through new objects less often; to be called before jax is imported.

    A step leaves no garbage, and what jax imports and traces stays: to look through it took a quarter of a start.
    """
    gc.set_threshold(50_000, 50, 10)
