"""The vocabulary of Megatron's `args` is padded as in its releases: to a multiple of the divisor times the tensor-parallel size."""

from argparse import Namespace

import pytest

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding
from megatron.tokenizer.tokenizer import _vocab_size_with_padding

SIZES = [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (50304, 128, 1, 50304), (7, 4, 2, 8)]


@pytest.mark.parametrize(("words", "divisor", "tensor_parallel", "padded"), SIZES)
def test_a_vocabulary_is_padded(words: int, divisor: int, tensor_parallel: int, padded: int):
    args = Namespace(make_vocab_size_divisible_by=divisor, tensor_model_parallel_size=tensor_parallel, rank=0)
    assert (
        vocab_size_with_padding(words, args) == _vocab_size_with_padding(words, args, logging_enabled=False) == padded
    )
    args = Namespace(**vars(args), tokenizer_type="NullTokenizer", vocab_size=words - 1, padded_vocab_size=None)
    build_tokenizer(args)  # a null tokenizer adds one
    assert args.padded_vocab_size == padded


def test_a_vocabulary_may_stay_as_it_is():
    args = Namespace(tokenizer_type="NullTokenizer", vocab_size=10, padded_vocab_size=None)
    build_tokenizer(args, pad_vocab_size=False)
    assert args.padded_vocab_size == 11
