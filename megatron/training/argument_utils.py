"""A script may parse its arguments first and hand them to `pretrain` as one object.

args = parse_and_validate_args(args_defaults={...})
pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), datasets_provider, ...)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel import collectives
from megatron.training.arguments.command_line import Arguments, ExtraArgs, parse_args
from megatron.training.global_vars import ParsedFirst, get_parsed_first, set_parsed_first
from megatron.training.initialize import initialize_megatron, stop_with


@accepts_defaults_only("extra_args_provider", ignore_unknown_args=False)
def parse_and_validate_args(
    extra_args_provider: ExtraArgs | None = None, args_defaults: Mapping[str, Any] | None = None
) -> Arguments:
    """Return the namespace of this process's command line before the run is set up; `get_args()` returns it too.

    A rank with invalid settings joins the others, so that all of them stop with code 2 and say why once.
    """
    try:
        args = parse_args(None, extra_args_provider, args_defaults).args
    except ConfigError:
        try:
            initialize_megatron(extra_args_provider, args_defaults)
        except (ConfigError, collectives.PeerError) as error:
            stop_with(error)
        raise
    set_parsed_first(ParsedFirst(args, extra_args_provider, dict(args_defaults or {})))
    return args


@dataclass
class PretrainConfigContainer:
    """What `pretrain` takes first from a script that has parsed its arguments: they, and the model if it is a config.

    model: its `provide(pre_process, post_process, vp_stage)` builds a stage, as a `model_provider` does. parsed: how they
    were parsed, so that the run is set up in the same way.
    """

    args: Any
    model: Any = None
    parsed: ParsedFirst | None = field(default=None, repr=False)

    @property
    def model_provider(self) -> Callable[..., nn.Module] | None:
        """The provider of the config's model; None if the script passes its own."""
        return None if self.model is None else self.model.provide


def pretrain_cfg_container_from_args(args: Any, model_cfg: Any = None) -> PretrainConfigContainer:
    """Return `args`, and a model's config, as `pretrain` takes them first."""
    return PretrainConfigContainer(args, model_cfg, get_parsed_first())


__getattr__ = names_of_megatron(__name__)
