"""The knobs of the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config import ConfigError, knob

# The flags that each type cannot do without, as field names.
NEEDED = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"] | None = knob(
        None,
        "GPT2BPETokenizer: vocab.json and merges.txt; HuggingFaceTokenizer: tokenizer.json; NullTokenizer: numbers",
    )
    vocab_file: str | None = knob(None, "vocab.json of GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = knob(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    tokenizer_model: str | None = knob(
        None, "tokenizer.json of HuggingFaceTokenizer, or the folder it is in", metavar="FILE"
    )
    vocab_size: int | None = knob(None, "ids of NullTokenizer, to which one for end-of-document is added")
    null_tokenizer_eod_id: int | None = knob(None, "end-of-document id of NullTokenizer; unset: the vocabulary size")

    def __post_init__(self) -> None:
        problems = []
        for name in NEEDED.get(self.tokenizer_type, ()):
            if getattr(self, name) is None:
                problems.append(f"--tokenizer-type {self.tokenizer_type} needs --{name.replace('_', '-')}")
        if self.vocab_size is not None and self.vocab_size < 1:
            problems.append(f"--vocab-size ({self.vocab_size}) must be at least 1")
        elif self.null_tokenizer_eod_id is not None and not 0 <= self.null_tokenizer_eod_id <= (self.vocab_size or 0):
            problems.append(
                f"--null-tokenizer-eod-id ({self.null_tokenizer_eod_id}) must lie between 0 and --vocab-size "
                f"({self.vocab_size})"
            )
        if problems:
            raise ConfigError(problems)
