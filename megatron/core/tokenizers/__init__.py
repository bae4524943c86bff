"""Text to token ids and back: `build_tokenizer(TokenizerConfig(...))`.

Names load on first use. The third-party package `tokenizers` is imported only when a tokenizer that needs it is built.
"""

import importlib
from typing import Any

_HOME = {
    "TokenizerConfig": "tokenizer_config",
    "Tokenizer": "tokenizers",
    "NullTokenizer": "tokenizers",
    "build_tokenizer": "tokenizers",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
