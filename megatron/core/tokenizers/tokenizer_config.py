"""The knobs of the tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import Count, FlagConfig, knob

# The flags that each type cannot do without, as field names.
NEEDED_BY_TYPE = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
NO_TOKENIZER = (
    "--tokenizer-type is required, or the files of the script's own choice (--vocab-file, and --merge-file for a GPT); "
    "NullTokenizer with --vocab-size is for data without text"
)
SIZED = ("NullTokenizer", "TikTokenizer")  # which read --vocab-size; the files of the others say it
EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")  # --vocab-extra-ids is theirs


@dataclass(frozen=True)
class TokenizerConfig(FlagConfig):
    """Tokenizer."""

    tokenizer_type: (
        Literal[
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = knob(
        None,
        "tokenizer, and the files it reads: BertWordPiece...: vocab.txt; GPT2BPETokenizer: vocab.json and merges.txt; "
        "SentencePiece and Llama2: tokenizer.model; HuggingFaceTokenizer: tokenizer.json; TikTokenizer: a JSON list; "
        "NullTokenizer: none, its texts are ids",
    )
    vocab_file: str | None = knob(None, "vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece...", metavar="FILE")
    merge_file: str | None = knob(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    tokenizer_model: str | None = knob(
        None,
        "tokenizer.json of HuggingFaceTokenizer or its folder, tokenizer.model of SentencePiece and Llama2, vocabulary "
        "of TikTokenizer",
        metavar="FILE",
    )
    vocab_size: Count | None = knob(
        None,
        "NullTokenizer: number of ids, to which end-of-document is added; TikTokenizer: number of ids, special tokens included; "
        "without a tokenizer: number of words of the model",
    )
    vocab_extra_ids: int = knob(0, f"sentinel tokens <extra_id_0>, ... to add to {', '.join(EXTRA_IDS)}")
    null_tokenizer_eod_id: int | None = knob(None, "end-of-document id of NullTokenizer; unset: the vocabulary size")
    tiktoken_pattern: Literal["v2", "v1"] = knob("v2", "how TikTokenizer cuts text into words")
    tiktoken_num_special_tokens: int = knob(1000, "first ids of TikTokenizer, which no text gives")
    tiktoken_special_tokens: list[str] | None = knob(
        None, "names of the first special tokens of TikTokenizer; unset: <unk> <s> </s> <mask> <pad> <cls> <sep>"
    )

    def problems(self) -> Iterator[str]:
        for name in NEEDED_BY_TYPE.get(self.tokenizer_type, ()):
            if getattr(self, name) is None:
                yield f"--tokenizer-type {self.tokenizer_type} needs --{name.replace('_', '-')}"
        words, end = self.vocab_size or 0, self.null_tokenizer_eod_id
        if words >= 0 and end is not None and not 0 <= end <= words:
            yield f"--null-tokenizer-eod-id ({end}) must lie between 0 and --vocab-size ({self.vocab_size})"
        yield from self._extra_problems()

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        has_its_own = self.tokenizer_type in NEEDED_BY_TYPE and self.tokenizer_type not in SIZED
        if self.vocab_size is None or not has_its_own:
            return {}
        return {"--vocab-size": f"--tokenizer-type {self.tokenizer_type} has a vocabulary of its own, whose size holds"}

    def _extra_problems(self) -> list[str]:
        problems = []
        if self.vocab_extra_ids < 0:
            problems.append(f"--vocab-extra-ids ({self.vocab_extra_ids}) must not be negative")
        elif self.vocab_extra_ids and self.tokenizer_type not in (None, *EXTRA_IDS):
            problems.append(
                f"--vocab-extra-ids ({self.vocab_extra_ids}) has no meaning with --tokenizer-type "
                f"{self.tokenizer_type}; leave it out, or use one of {', '.join(EXTRA_IDS)}"
            )
        if self.tokenizer_type == "TikTokenizer":
            names, room = self.tiktoken_special_tokens or [], self.tiktoken_num_special_tokens
            if len(set(names)) < len(names) or (names and not {"<unk>", "<s>", "</s>"} <= set(names)):
                problems.append(
                    "--tiktoken-special-tokens must be different names, with <unk>, <s> and </s> among them"
                )
            if not max(len(names), 3) <= room < (self.vocab_size or room + 1):
                problems.append(
                    f"--tiktoken-num-special-tokens ({room}) must have room for the special tokens "
                    f"({max(len(names), 3)} at least) and lie below --vocab-size ({self.vocab_size})"
                )
        return problems
