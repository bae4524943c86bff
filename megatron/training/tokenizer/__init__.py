"""Import path of Megatron core."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {".tokenizer": "build_tokenizer"})
