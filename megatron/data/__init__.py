"""Import path of Megatron 2.x: its data sets, from `megatron.training.classic`."""
