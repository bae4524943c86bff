"""Import path of Megatron without `core`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.training.tokenizer.gpt2_tokenization import (
    PRETRAINED_MERGES_ARCHIVE_MAP as PRETRAINED_MERGES_ARCHIVE_MAP,
    PRETRAINED_VOCAB_ARCHIVE_MAP as PRETRAINED_VOCAB_ARCHIVE_MAP,
)

__getattr__ = names_of_megatron(__name__)
