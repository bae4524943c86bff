"""Import path of Megatron core."""

from megatron.core.classic.modules import WrappedTorchNorm as WrappedTorchNorm
