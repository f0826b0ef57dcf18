"""Tests of runs share the programs of equal runs."""

from kept_steps import fresh, kept, no_curve  # noqa: F401
