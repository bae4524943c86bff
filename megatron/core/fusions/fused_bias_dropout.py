"""Import path of Megatron core."""

from megatron.core.classic.modules import get_bias_dropout_add as get_bias_dropout_add
