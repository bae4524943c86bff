"""Enums of Megatron's layers."""

from enum import Enum

from megatron.core.base.lazy_imports import names_of_megatron

AttnMaskType = Enum(
    "AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"]
)


AttnType = Enum("AttnType", ["self_attn", "cross_attn"])


AttnBackend = Enum("AttnBackend", ["flash", "fused", "unfused", "local", "auto"])


LayerType = Enum(
    "LayerType",
    # the last three name layers of retrieval, which are not built: scripts compare with them
    [
        "embedding",
        "loss",
        "encoder",
        "decoder",
        "mtp",
        "retro_encoder",
        "retro_decoder",
        "retro_decoder_with_retriever",
    ],
)

__getattr__ = names_of_megatron(__name__)
