"""Import path of Megatron 2.x."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.gpt2_files")
