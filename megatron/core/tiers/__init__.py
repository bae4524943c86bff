"""Tiers of memory beside the device's: what a rank keeps of its state on the host or in a file, and how it gets at it."""
