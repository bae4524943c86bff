"""Megatron's `TransformerBlock`: the layers of one pipeline stage, built from a spec."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import takes
from megatron.core.ops.attention.masks import Documents
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.local_layer_specs import bert_layer_local_spec, get_gpt_layer_local_spec
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import context_of, settings_of
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer, layers_of_stage


@takes(layer_norm=None)
@dataclass
class TransformerBlockSubmodules:
    layer_specs: list[ModuleSpec] | None = None


class OfTwoSequences(NamedTuple):
    """In place of a mask: the layers' own, and the other sequence that they attend to, with its mask."""

    own: Any
    context: Tensor
    context_mask: Tensor | None


class SpecLayer(nn.Module):
    """A user's layer in a stage of ours. forward(x [s, b, h], mask, angles) -> the shape of x"""

    gives_hidden_states = True

    def __init__(self, spec: Any, config: Any, layer_number: int):
        super().__init__()
        self.layer = build_module(spec, config=config, layer_number=layer_number)

    def forward(self, x: Tensor, mask: Any = None, angles: Tensor | None = None, cache: Any = None) -> Tensor:
        if cache is not None:
            raise NotImplementedError("generation with the layers of a script is not built yet; leave out the cache")
        rotary = {} if angles is None else {"rotary_pos_emb": torch.cat((angles, angles), -1).unsqueeze(2)}
        if isinstance(mask, OfTwoSequences):
            rotary |= {"context": mask.context, "context_mask": mask.context_mask}
            mask = mask.own
        out = self.layer(x, mask.mask if isinstance(mask, Documents) else mask, **rotary)
        return out[0] if isinstance(out, tuple) else out


def make_layer_of(spec: Any, config: Any) -> MakePart:
    """What builds the layers of a spec: of ours, if the spec is as this file made it."""
    spec = spec.submodules if isinstance(getattr(spec, "submodules", None), TransformerBlockSubmodules) else spec
    first = layers_of_stage(config).start

    def make(ours: ModelConfig, layer: int, context: LayerContext) -> nn.Module:
        one = spec.layer_specs[layer - first] if isinstance(spec, TransformerBlockSubmodules) else spec
        normed = one == get_gpt_layer_local_spec(qk_layernorm=True)
        if not normed and one not in (get_gpt_layer_local_spec(), bert_layer_local_spec):
            return SpecLayer(one, config, layer - first + 1)
        made = ParallelTransformerLayer(replace(ours, qk_layernorm=True) if normed else ours, layer, context)
        made.layer_number = layer + 1
        return made

    return make


class TransformerBlock(ParallelTransformer):
    """The layers of a stage. forward(hidden_states [s, b, h], attention_mask) -> the same shape"""

    @takes(pg_collection=None, vp_stage=None)
    def __init__(
        self, config: Any, spec: Any, post_layer_norm: bool = True, pre_process: bool = True, post_process: bool = True
    ):
        ours, make = settings_of(config), make_layer_of(spec, config)
        has_norm = post_layer_norm and post_process
        super().__init__(
            ours, layers_of_stage(config), context_of(ours, config), post_process=has_norm, make_layer=make
        )
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: Tensor | None = None
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.checkpoint_core_attention = config.recompute_granularity == "selective"

    def _get_layer(self, layer_number: int) -> nn.Module:
        return list(self.layers.values())[layer_number]

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if given := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"TransformerBlock: {', '.join(given)} is not built yet; leave it out")
        x = hidden_states if self.pre_process else self.input_tensor
        seen = attention_mask if context is None else OfTwoSequences(attention_mask, context, context_mask)
        return super().forward(x, seen)


__getattr__ = names_of_megatron(__name__)
