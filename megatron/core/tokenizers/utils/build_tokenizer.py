"""Build the tokenizer that Megatron's `args` name."""

from argparse import Namespace
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
        args.padded_vocab_size = tokenizer.vocab_size
        if values.get("pad_vocab_size", True):
            args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, Namespace(**values))
    return tokenizer


def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """Return the next multiple of make_vocab_size_divisible_by x tensor_model_parallel_size, 128 and 1 if `args` lacks them.

    Nothing is logged.
    """
    values = vars(args)
    multiple = values.get("make_vocab_size_divisible_by", 128) * values.get("tensor_model_parallel_size", 1)
    return -(-orig_vocab_size // multiple) * multiple


_vocab_size_with_padding = vocab_size_with_padding  # its older name


__getattr__ = names_of_megatron(__name__)
