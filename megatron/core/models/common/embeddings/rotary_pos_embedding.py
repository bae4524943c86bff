"""Import path of Megatron core."""

from megatron.core.classic.modules import RotaryEmbedding as RotaryEmbedding
