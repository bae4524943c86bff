"""Import path of Megatron without `core`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig
from megatron.training.arguments.transformer_config_from_args import (
    core_transformer_config_from_args as core_transformer_config_from_args,
    parse_args as parse_args,
)

__getattr__ = names_of_megatron(__name__)
