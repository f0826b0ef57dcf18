"""What tests of whole programs share: the programs of equal runs."""

from kept_steps import fresh, kept  # noqa: F401
