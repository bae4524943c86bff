"""Megatron's `Split`, and `compile_helpers`, which has nothing to compile."""

from enum import IntEnum

from megatron.core.base.lazy_imports import names_of_megatron

Split = IntEnum("Split", ["train", "valid", "test"], start=0)


def compile_helpers() -> None:
    """Do nothing: sample indices are built without compiled code."""


__getattr__ = names_of_megatron(__name__)
