"""Enums of Megatron's layers."""

from enum import Enum

from megatron.core.base.lazy_imports import names_of_megatron

AttnMaskType = Enum(
    "AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"]
)


AttnType = Enum("AttnType", ["self_attn", "cross_attn"])


AttnBackend = Enum("AttnBackend", ["flash", "fused", "unfused", "local", "auto"])


LayerType = Enum("LayerType", ["embedding", "loss", "encoder", "decoder", "mtp"])

__getattr__ = names_of_megatron(__name__)
