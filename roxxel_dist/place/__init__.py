"""The place of a run: its folder, on a disk or in a bucket."""
