"""Provide `Float16Module` of Megatron 2.5 to core 0.5."""

from typing import Any

from torch import nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer import module


class Float16Module(module.Float16Module):
    """A module in half precision. Megatron's older argument order: the module first, then the args."""

    def __init__(self, module: nn.Module, args: Any):
        super().__init__(args, module)


__getattr__ = names_of_megatron(__name__)
