"""A data set of your own: random phrases, each repeated, which a model learns by attending to the past.

A data set has a length, and its items are dictionaries of arrays. Item i must depend on i alone: then every rank can read any
item, and a resumed run needs only a sample count.
"""

from dataclasses import dataclass

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError, option

WORDS = 100  # default of --vocab-size


@dataclass(frozen=True)
class PhraseConfig:
    """Phrases."""

    phrase_length: int = option(8, "tokens per phrase")

    def __post_init__(self) -> None:
        if self.phrase_length < 1:
            raise ConfigError(f"--phrase-length is {self.phrase_length}; it must be at least 1")


class Phrases:
    """`size` texts of `seq_length` tokens, drawn from (*seed, number). seed: (run's seed, split)."""

    def __init__(self, config: PhraseConfig, size: int, seq_length: int, vocab_size: int, seed: tuple[int, int]):
        self.config, self.size, self.seq_length = config, size, seq_length
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """int64 [seq_length] each: tokens, labels, and restarts (1 if the label starts the phrase again)."""
        phrase = np.random.default_rng([*self.seed, i]).integers(self.vocab_size, size=self.config.phrase_length)
        text = np.resize(phrase, self.seq_length + 1)
        restarts = np.arange(1, self.seq_length + 1) % self.config.phrase_length == 0
        return {"tokens": text[:-1], "labels": text[1:], "restarts": restarts.astype(np.int64)}
