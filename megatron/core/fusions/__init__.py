"""Megatron's names of fused operations, for ours."""
