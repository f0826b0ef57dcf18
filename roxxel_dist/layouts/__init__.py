"""Whether all layouts compute the same: one step on one device, and the same step divided in each way."""
