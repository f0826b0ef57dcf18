"""Models that are loaded again and again are traced once."""

from kept_steps import kept, no_curve  # noqa: F401  (of the tests here)
