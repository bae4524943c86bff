"""Import path of Megatron 2.x: `megatron.legacy.data`."""
