"""Text to token ids and back: `build_tokenizer(TokenizerConfig(...))`.

May import: `config`. Names load on first use; a third-party package is imported when a tokenizer that needs it is
built. To add a type, add an entry to `TOKENIZERS` (docs/adding_a_model.md).
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer as MegatronTokenizer
    from megatron.core.tokenizers.tokenizer_config_and_build import (
        TokenizerConfig as TokenizerConfig,
        build_tokenizer as build_tokenizer,
    )
    from megatron.core.tokenizers.tokenizer_registry import (
        TOKENIZERS as TOKENIZERS,
        NullTokenizer as NullTokenizer,
        Tokenizer as Tokenizer,
        TokenizerType as TokenizerType,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".megatron_tokenizer": "MegatronTokenizer",
        ".tokenizer_config_and_build": "TokenizerConfig build_tokenizer",
        ".tokenizer_registry": "TOKENIZERS Tokenizer TokenizerType NullTokenizer",
    },
)
