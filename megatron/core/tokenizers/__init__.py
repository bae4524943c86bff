"""Text to token ids and back: `build_tokenizer(TokenizerConfig(...))`.

May import: `config`. Names load on first use; a third-party package is imported when a tokenizer that needs it is built.
To add a type: a line of `tokenizers.TOKENIZERS`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".tokenizer_config": "TokenizerConfig build_tokenizer",
        ".tokenizer_registry": "TOKENIZERS Tokenizer TokenizerType NullTokenizer",
    },
)
