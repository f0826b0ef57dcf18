"""Tests of runs share the programs of equal runs."""

from kept_steps import fresh, kept  # noqa: F401
