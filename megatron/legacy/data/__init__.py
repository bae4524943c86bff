"""Data sets by Megatron's older functions."""
