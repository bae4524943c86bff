"""Import path of Megatron core."""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.training.tokenizer.tokenizer import build_tokenizer as build_tokenizer

__getattr__, __dir__ = lazy_names(__name__, {".tokenizer": "build_tokenizer"})
