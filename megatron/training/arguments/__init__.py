"""The command line and the settings of a run.

Here are a dataclass for each component, the rules between them, Megatron's flags, help and YAML.

    command_line     argv -> settings
    config, *_config                   the dataclasses whose fields are the flags
    validation                              rules between components; all problems are found before a process group
                                            exists
    ignored_and_refused_flags               Megatron's other flags
    record_script_flags, unused_settings    the script's own flags; those without effect
    args_namespace                          `args` as Megatron's scripts read it
    load_args_from_checkpoint               settings taken from a checkpoint
    hf_config, yaml_arguments               settings taken from a config.json, from a YAML file
    choose_checkpoint_to_resume,            the checkpoint a run starts from, and how its settings differ
    compare_settings_with_checkpoint

Megatron's names of `megatron.training.arguments` are imported on first use.
To add a flag, add a field to its component's dataclass.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig
    from megatron.training.argument_utils import parse_and_validate_args as parse_and_validate_args
    from megatron.training.arguments.transformer_config_from_args import (
        core_transformer_config_from_args as core_transformer_config_from_args,
        parse_args as parse_args,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".transformer_config_from_args": "core_transformer_config_from_args parse_args",
        "megatron.training.argument_utils": "parse_and_validate_args",
        "megatron.core.transformer.transformer_config": "TransformerConfig",
    },
)
