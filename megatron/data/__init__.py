"""Import path of Megatron without `core`: `megatron.legacy.data`."""
