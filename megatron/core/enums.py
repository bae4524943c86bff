"""Enums that scripts pass to `pretrain`."""

from enum import Enum

from megatron.core.base.lazy_imports import names_of_megatron


class ModelType(Enum):
    """Megatron's classes of models."""

    encoder_or_decoder = 1  # one stack of layers: GPT, BERT
    encoder_and_decoder = 2  # two stacks, the second attends to the first: T5
    retro_encoder = 3
    retro_decoder = 4


__getattr__ = names_of_megatron(__name__)
