"""Megatron's `PackedSeqParams`: several texts in one sequence, which our layers refuse."""

from dataclasses import make_dataclass
from typing import Any

_FIELDS = (
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
    "local_cp_size",
    "cp_group",
)

PackedSeqParams = make_dataclass("PackedSeqParams", [(name, Any, None) for name in _FIELDS])
