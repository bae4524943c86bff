"""Import path of Megatron core."""

from megatron.core.classic.grouped_gemm import *  # noqa: F403
