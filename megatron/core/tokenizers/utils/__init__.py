"""Megatron's path of `build_tokenizer(args)`."""
