"""Import path of Megatron 2.x."""

from megatron.core.classic.transformer_config import core_transformer_config_from_args
from megatron.training.classic.building import parse_args

__all__ = ["core_transformer_config_from_args", "parse_args"]
