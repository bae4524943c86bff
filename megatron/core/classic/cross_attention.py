"""Attention to another sequence by Megatron's signatures, and the layers of T5's encoder and decoder as specs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.core.base.signatures import takes
from megatron.core.classic.layers import (
    DotProductAttention,
    TransformerBlockSubmodules,
    bert_layer_local_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.classic.modules import AttnMaskType, FusedLayerNorm, context_of, get_bias_dropout_add, settings_of
from megatron.core.classic.specs import ModuleSpec, get_module
from megatron.core.classic.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.cross_attention import ParallelCrossAttention


@dataclass
class CrossAttentionSubmodules:
    linear_q: Any = None
    linear_kv: Any = None
    core_attention: Any = None
    linear_proj: Any = None


_OURS = [ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear]


class CrossAttention(ParallelCrossAttention):
    """forward(hidden_states [s, b, h], attention_mask bool [.., s, m], key_value_states [m, b, h]) -> (output, bias or None)"""

    @takes(cp_comm_type=None, pg_collection=None)
    def __init__(
        self,
        config: Any,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
    ):
        if [get_module(part) for part in vars(submodules).values()] != _OURS:
            raise NotImplementedError("CrossAttention: parts of a script's own are not built; leave those of ours")
        ours = settings_of(config)
        super().__init__(ours, layer_number - 1, context_of(ours, config))
        self.config, self.attn_mask_type = config, attn_mask_type
        self.layer_number, self.linear_proj.skip_bias_add = layer_number, True

    @takes(inference_params=None, rotary_pos_emb=None, packed_seq_params=None)
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.linear_proj(self.attended(hidden_states, key_value_states, attention_mask))


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules([bert_layer_local_spec] * num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec()
    cross = ModuleSpec(CrossAttention, submodules=CrossAttentionSubmodules(*_OURS))
    names = {"pre_cross_attn_layernorm": FusedLayerNorm, "cross_attention": cross}
    spec.submodules = replace(spec.submodules, **names, cross_attn_bda=get_bias_dropout_add)
    return TransformerBlockSubmodules([spec] * num_layers)


get_t5_encoder_with_transformer_engine_block_spec = get_t5_encoder_with_local_block_spec
get_t5_decoder_with_transformer_engine_block_spec = get_t5_decoder_with_local_block_spec
