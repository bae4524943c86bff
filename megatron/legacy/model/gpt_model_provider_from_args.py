"""A GPT whose parts a script chooses before its run is set up."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training.arguments.transformer_config_from_args import core_transformer_config_from_args
from megatron.training.global_vars import get_args


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
