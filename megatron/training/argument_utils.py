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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel import collectives
from megatron.core.transformer.spec_utils import import_module
from megatron.training.arguments.command_line import Arguments, ExtraArgs, parse_args
from megatron.training.arguments.transformer_config_from_args import core_transformer_config_from_args
from megatron.training.global_vars import ParsedFirst, get_args, get_parsed_first, set_parsed_first
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
class GPTModelConfig:
    """A GPT whose parts are chosen before the run is set up.

    transformer: a `TransformerConfig`, which a script may change. transformer_layer_spec: a layer's spec, or None for
    our own layers. Everything else is read from the arguments when the model is built.
    """

    transformer: Any
    transformer_layer_spec: Any = None

    def provide(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
    ) -> nn.Module:
        """Build this pipeline stage's part of the model, as a `model_provider` does."""
        args = get_args()
        spec = self.transformer_layer_spec
        if spec is None:
            spec = get_gpt_decoder_block_spec(
                self.transformer,
                use_transformer_engine=False,
                normalization=args.normalization,
                qk_l2_norm=args.qk_l2_norm,
                vp_stage=vp_stage,
            )
        return GPTModel(
            self.transformer,
            spec,
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            vp_stage=vp_stage,
        )


def gpt_config_from_args(
    args: Any, config: Any = None, model_config_cls: type[GPTModelConfig] = GPTModelConfig
) -> GPTModelConfig:
    """Return the GPT that `args` describe. config: a `TransformerConfig`; default: that of the arguments."""
    if config is None:
        config = core_transformer_config_from_args(args)
    spec = None if args.spec is None else import_module(args.spec)
    return model_config_cls(transformer=config, transformer_layer_spec=spec)


@dataclass
class PretrainConfigContainer:
    """What `pretrain` takes first from a script that has parsed its arguments: they, and the model if it is a config.

    parsed: how they were parsed, so that the run is set up in the same way.
    """

    args: Any
    model: GPTModelConfig | None = None
    parsed: ParsedFirst | None = field(default=None, repr=False)

    @property
    def model_provider(self) -> Callable[..., nn.Module] | None:
        """The provider of the config's model; None if the script passes its own."""
        return None if self.model is None else self.model.provide


def pretrain_cfg_container_from_args(args: Any, model_cfg: GPTModelConfig | None = None) -> PretrainConfigContainer:
    """Return `args`, and a model's config, as `pretrain` takes them first."""
    return PretrainConfigContainer(args, model_cfg, get_parsed_first())


__getattr__ = names_of_megatron(__name__)
