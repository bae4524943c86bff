"""Megatron's names for building a tokenizer."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.tokenizers.tokenizer_registry import NullTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_tokenizer


class _NullTokenizer(NullTokenizer):
    """Text that is numbers already: "5 17 3" is [5, 17, 3].

    It has `vocab_size` numbers, and one more for the end of a document.
    """

    cls = sep = -1
    mask, additional_special_tokens_ids = -1, None

    def __init__(self, vocab_size: int):
        super().__init__(int(vocab_size))


__getattr__ = names_of_megatron(__name__)
