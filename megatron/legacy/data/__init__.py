"""Build data sets with Megatron's older functions."""
