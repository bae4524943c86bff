"""Megatron's block specs of T5's encoder and decoder."""

from dataclasses import replace

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.attention import CROSS_ATTENTION_PARTS, CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.gpt_and_bert_local_layer_specs import bert_layer_local_spec, get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import FusedLayerNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules([bert_layer_local_spec] * num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec()
    spec.submodules = replace(
        spec.submodules,
        pre_cross_attn_layernorm=FusedLayerNorm,
        cross_attention=ModuleSpec(CrossAttention, submodules=CrossAttentionSubmodules(*CROSS_ATTENTION_PARTS)),
        cross_attn_bda=get_bias_dropout_add,
    )
    return TransformerBlockSubmodules([spec] * num_layers)


get_t5_encoder_with_transformer_engine_block_spec = get_t5_encoder_with_local_block_spec


get_t5_decoder_with_transformer_engine_block_spec = get_t5_decoder_with_local_block_spec

__getattr__ = names_of_megatron(__name__)
