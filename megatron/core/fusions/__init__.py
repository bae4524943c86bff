"""Megatron's fused operations, over ours."""
