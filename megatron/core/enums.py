"""Names that top-level scripts pass to the loop."""

from enum import Enum


class ModelType(Enum):
    """How a model uses the pipeline."""

    encoder_or_decoder = 1  # one stack of layers: GPT, BERT
    encoder_and_decoder = 2  # two stacks, of which the second reads the first: T5
