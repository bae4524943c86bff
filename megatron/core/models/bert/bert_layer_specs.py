"""Megatron's layer specs of a BERT."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.gpt_and_bert_local_layer_specs import (
    _layer_spec,
    bert_layer_local_spec as bert_layer_local_spec,
)

bert_layer_with_transformer_engine_spec = _layer_spec(AttnMaskType.padding)

__getattr__ = names_of_megatron(__name__)
