"""The settings of the tokenizer, and the function that builds the tokenizer they name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, default_of, flags_of, option, option_fields
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS, Tokenizer, TokenizerType

NO_TOKENIZER = (
    "--tokenizer-type is required, or the files of the script's own choice (--vocab-file, and --merge-file for a GPT); "
    "NullTokenizer with --vocab-size is for data without text"
)
EXTRA_IDS = [name for name, kind in TOKENIZERS.items() if "vocab_extra_ids" in kind.reads]

_READ_BY_ALL = ("tokenizer_type", "model_vocab_size", "vocab_extra_ids")  # the last is refused where it is not read
_WHY_UNREAD = {
    "vocab_size": "has a vocabulary of its own, whose size holds",
    "tokenizer_transformers_version": "reads no folder of transformers",
}


@dataclass(frozen=True)
class TokenizerConfig(FlagConfig):
    """Tokenizer."""

    tokenizer_type: str | None = option(
        None,
        "tokenizer; the files each needs: BertWordPiece...: vocab.txt; GPT2BPETokenizer: vocab.json and merges.txt; "
        "SentencePiece and Llama2: tokenizer.model; HuggingFaceTokenizer: tokenizer.json; TikTokenizer: a JSON list; "
        "NullTokenizer: none, its texts are token ids",
        names=TOKENIZERS,
    )
    vocab_file: str | None = option(
        None, "vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece...", metavar="FILE"
    )
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    tokenizer_model: str | None = option(
        None,
        "tokenizer.json (HuggingFaceTokenizer, file or folder), tokenizer.model (SentencePiece, Llama2), or vocabulary "
        "(TikTokenizer)",
        metavar="FILE",
    )
    tokenizer_transformers_version: Literal["4", "5"] | None = option(
        None,
        "version of transformers to imitate: HuggingFaceTokenizer gives the same token ids as this version; needed for "
        "a folder for which versions 4.57 and 5 give different ids",
    )
    vocab_size: Count | None = option(
        None,
        "vocabulary size of NullTokenizer (without the end-of-document id, which is added), of TikTokenizer (with "
        "its special tokens), or of a model without tokenizer",
    )
    model_vocab_size: Count | None = option(
        None, "rows of the model's embedding, if their number differs from the tokenizer's, as in many published models"
    )
    vocab_extra_ids: int = option(0, f"number of sentinel tokens <extra_id_0>, ... to add to {', '.join(EXTRA_IDS)}")
    null_tokenizer_eod_id: int | None = option(
        None, "end-of-document id of NullTokenizer; default: the value of --vocab-size"
    )
    tiktoken_pattern: Literal["v2", "v1"] = option("v2", "word pattern of TikTokenizer")
    tiktoken_num_special_tokens: int = option(1000, "number of special tokens of TikTokenizer; they have the first ids")
    tiktoken_special_tokens: list[str] | None = option(
        None, "names of the first special tokens of TikTokenizer; default: <unk> <s> </s> <mask> <pad> <cls> <sep>"
    )

    @property
    def type(self) -> TokenizerType | None:
        """The entry of `TOKENIZERS`; None while no tokenizer is chosen."""
        return TOKENIZERS.get(self.tokenizer_type)

    def problems(self) -> Iterator[str]:
        kind = self.type
        if kind is not None:
            for name in kind.needs:
                if getattr(self, name) is None:
                    yield f"--tokenizer-type {self.tokenizer_type} needs --{name.replace('_', '-')}"
        vocab_size = self.vocab_size or 0
        eod = self.null_tokenizer_eod_id
        if vocab_size >= 0 and eod is not None and not 0 <= eod <= vocab_size:
            yield f"--null-tokenizer-eod-id ({eod}) must be between 0 and --vocab-size ({self.vocab_size})"
        if self.vocab_extra_ids < 0:
            yield f"--vocab-extra-ids ({self.vocab_extra_ids}) must not be negative"
        elif self.vocab_extra_ids and kind and "vocab_extra_ids" not in kind.reads:
            yield (
                f"--vocab-extra-ids ({self.vocab_extra_ids}) has no meaning with --tokenizer-type "
                f"{self.tokenizer_type}; leave it out, or use one of {', '.join(EXTRA_IDS)}"
            )
        if self.tokenizer_type == "TikTokenizer":
            yield from self._tiktoken_problems()

    def _tiktoken_problems(self) -> Iterator[str]:
        names = self.tiktoken_special_tokens or []
        has_repeated = len(set(names)) < len(names)
        if has_repeated or (names and not {"<unk>", "<s>", "</s>"} <= set(names)):
            yield "--tiktoken-special-tokens must be different names, and must include <unk>, <s> and </s>"
        count = self.tiktoken_num_special_tokens
        needed = max(len(names), 3)
        is_below_vocab_size = not self.vocab_size or count < self.vocab_size
        if count < needed or not is_below_vocab_size:
            yield (
                f"--tiktoken-num-special-tokens ({count}) must have room for the special tokens, at least {needed}, "
                f"and must be below --vocab-size ({self.vocab_size})"
            )

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        kind = self.type
        if kind is None:
            return {}
        ignored = {}
        for field in option_fields(TokenizerConfig):
            is_read = field.name in (*_READ_BY_ALL, *kind.needs, *kind.reads)
            if is_read or getattr(self, field.name) == default_of(field):
                continue
            reason = _WHY_UNREAD.get(field.name, "does not read it")
            ignored[flags_of(field)[0]] = f"--tokenizer-type {self.tokenizer_type} {reason}"
        return ignored


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that `config` names. Raises as its `TokenizerType.build` does."""
    if config.type is None:
        raise ValueError(f"no tokenizer was given; set --tokenizer-type to one of {', '.join(TOKENIZERS)}")
    return config.type.build(config)
