"""Megatron's paths of data sets that belong to its scripts."""
