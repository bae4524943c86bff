"""Import path of Megatron core."""

from megatron.core.classic.layers import DotProductAttention as DotProductAttention
