"""Build the tokenizer that Megatron's `args` name."""

from dataclasses import fields
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer as build
from megatron.core.tokenizers.tokenizer_registry import Tokenizer


def build_tokenizer(args: Any, **kwargs: Any) -> Tokenizer:
    """Return the tokenizer that `args` names.

    Sets `args.padded_vocab_size` if it is not set: a multiple of make_vocab_size_divisible_by x
    tensor_model_parallel_size. kwargs: further settings, by the names of flags.
    """
    values = {**vars(args), **kwargs}
    names = [one.name for one in fields(TokenizerConfig) if values.get(one.name) is not None]
    tokenizer = build(TokenizerConfig(**{name: values[name] for name in names}))
    if values.get("padded_vocab_size") is None:
        multiple = 1
        if values.get("pad_vocab_size", True):
            multiple = values.get("make_vocab_size_divisible_by", 128) * values.get("tensor_model_parallel_size", 1)
        args.padded_vocab_size = -(-tokenizer.vocab_size // multiple) * multiple
    return tokenizer


__getattr__ = names_of_megatron(__name__)
