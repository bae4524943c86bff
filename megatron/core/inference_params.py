"""Megatron's `InferenceParams`, which nothing here reads.

`megatron.core.inference.generate` keeps a cache of its own.
"""


class InferenceParams:
    """Megatron's cache of keys and values, which is not built."""

    def __init__(self, max_batch_size: int, max_sequence_length: int):
        raise NotImplementedError(
            "InferenceParams: not built; the models do not support Megatron's cache; "
            "generate text with megatron.core.inference.generate.generate, or tools/generate.py"
        )
