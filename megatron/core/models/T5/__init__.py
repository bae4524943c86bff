"""Import path of Megatron core."""
