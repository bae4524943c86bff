"""Import path of Megatron core. Our own command line is `megatron.training.command_line`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.transformer_config": "core_transformer_config_from_args",
        "megatron.training.classic.building": "parse_args",
    },
)
