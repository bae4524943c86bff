"""Import path of Megatron core."""

from megatron.core.classic.t5 import T5Model as T5Model
