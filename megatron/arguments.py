"""Import path of Megatron 2.x."""

from megatron.training.arguments import core_transformer_config_from_args, parse_args

__all__ = ["core_transformer_config_from_args", "parse_args"]
