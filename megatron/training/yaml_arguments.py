"""Megatron's function for configs from a YAML file."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.training.arguments.transformer_config_from_args import core_transformer_config_from_args


def core_transformer_config_from_yaml(args: Any, transfomer_key: str = "language_model") -> Any:
    """Return the model's settings as a `TransformerConfig`. `args` has those of --yaml-cfg by the names of flags.

    transfomer_key, in Megatron's spelling: without effect; the groups of a file do not matter.
    """
    del transfomer_key
    return core_transformer_config_from_args(args)


__getattr__ = names_of_megatron(__name__)
