"""Import path of Megatron without `core`."""
