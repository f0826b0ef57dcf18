"""Virtual shards: a step whose bits do not depend on the number of devices (see docs/concepts/exactness.md)."""
