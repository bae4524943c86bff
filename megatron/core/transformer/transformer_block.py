"""Megatron's `TransformerBlock`: the layers of one pipeline stage, built from a spec."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.attention.masks import Documents
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.local_layer_specs import bert_layer_local_spec, get_gpt_layer_local_spec
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import context_of, settings_of
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer, layers_of_stage


@accepts_defaults_only(layer_norm=None)
@dataclass
class TransformerBlockSubmodules:
    """The parts of a `TransformerBlock`: a spec for each layer of the stage."""

    layer_specs: list[ModuleSpec] | None = None


class MasksAndContext(NamedTuple):
    """The mask of the layers' own sequence, and the other sequence to which they attend, with its mask.

    attention_mask: bool [b or 1, 1, s, s]; context: [m, b, h]; context_mask: bool [.., s or 1, m]. Masks are True
    where masked.
    """

    attention_mask: Any
    context: Tensor
    context_mask: Tensor | None


class SpecLayer(nn.Module):
    """A script's own layer in one of our stages. forward(x [s, b, h], mask, angles) -> the shape of x

    mask: a `Mask` or a `MasksAndContext`. angles: [s, b or 1, width / 2]; the layer's rotary_pos_emb is
    [s, b or 1, 1, width]. Raises NotImplementedError with a cache.
    """

    gives_hidden_states = True

    def __init__(self, spec: Any, config: Any, layer_number: int):
        super().__init__()
        self.layer = build_module(spec, config=config, layer_number=layer_number)

    def forward(self, x: Tensor, mask: Any = None, angles: Tensor | None = None, cache: Any = None) -> Tensor:
        if cache is not None:
            raise NotImplementedError(
                "generation with a key/value cache is not supported yet for custom layers; leave out the cache"
            )
        options = {}
        if angles is not None:
            # Megatron repeats the angles for both halves of a head
            options["rotary_pos_emb"] = torch.cat((angles, angles), -1).unsqueeze(2)  # [s, b or 1, 1, width]
        if isinstance(mask, MasksAndContext):
            options["context"] = mask.context
            options["context_mask"] = mask.context_mask
            mask = mask.attention_mask
        if isinstance(mask, Documents):
            mask = mask.mask  # [b, 1, s, s]
        out = self.layer(x, mask, **options)
        return out[0] if isinstance(out, tuple) else out


def make_layer_from_spec(spec: Any, config: Any) -> MakePart:
    """Return the function that builds the layers of a spec: our own layers, if the spec is one of our local specs."""
    if isinstance(getattr(spec, "submodules", None), TransformerBlockSubmodules):
        spec = spec.submodules
    first = layers_of_stage(config).start

    def make(model_config: ModelConfig, layer: int, context: LayerContext) -> nn.Module:
        layer_spec = spec.layer_specs[layer - first] if isinstance(spec, TransformerBlockSubmodules) else spec
        has_qk_norm = layer_spec == get_gpt_layer_local_spec(qk_layernorm=True)
        if not has_qk_norm and layer_spec not in (get_gpt_layer_local_spec(), bert_layer_local_spec):
            return SpecLayer(layer_spec, config, layer - first + 1)
        if has_qk_norm:
            model_config = replace(model_config, qk_layernorm=True)
        built = ParallelTransformerLayer(model_config, layer, context)
        built.layer_number = layer + 1
        return built

    return make


class TransformerBlock(ParallelTransformer):
    """The layers of a stage, with Megatron's arguments.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism), attention_mask [b or 1, 1, s, s], True
    where masked, context [m, b, h], context_mask [.., s or 1, m]) -> the shape of hidden_states. All ranks of this
    stage in one replica must call. Raises NotImplementedError for other arguments.
    """

    @accepts_defaults_only(pg_collection=None, vp_stage=None)
    def __init__(
        self, config: Any, spec: Any, post_layer_norm: bool = True, pre_process: bool = True, post_process: bool = True
    ):
        model_config = settings_of(config)
        super().__init__(
            model_config,
            layers_of_stage(config),
            context_of(model_config, config),
            post_process=post_layer_norm and post_process,  # which builds the final norm
            make_layer=make_layer_from_spec(spec, config),
        )
        self.config = config
        self.pre_process = pre_process
        self.post_process = post_process
        self.input_tensor: Tensor | None = None
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.checkpoint_core_attention = config.recompute_granularity == "selective"

    def _get_layer(self, layer_number: int) -> nn.Module:
        return list(self.layers.values())[layer_number]

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Set the hidden states [s, b, h] that forward starts from, on every stage but the first."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if not_built := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"TransformerBlock: {', '.join(not_built)} is not built yet; leave it out")
        x = hidden_states if self.pre_process else self.input_tensor
        mask = attention_mask if context is None else MasksAndContext(attention_mask, context, context_mask)
        return super().forward(x, mask)


__getattr__ = names_of_megatron(__name__)
