"""What a run will read: for each data set of a blend its tokens, samples, passes over the data, and bytes.

    python tools/data_plan.py --data-path 0.7 data/books_text_document 0.3 data/wiki_text_document \
        --seq-length 1024 --global-batch-size 256 --train-iters 10000

Weights are shares of samples, as in training; without weights every data set is read in proportion to its tokens. Only the
training split is planned. Nothing is built or written.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import ConfigError, FlagParser, add_flags, build, knob, read_flags
from megatron.core.datasets.data_config import DEFAULT_SPLIT
from megatron.core.datasets.index_map import parse_split, split_ranges
from megatron.core.datasets.indexed import IndexedDataset


@dataclass(frozen=True)
class PlanConfig:
    """A run's data."""

    data_path: list[str] | None = knob(None, "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..., or PREFIX PREFIX ...")
    split: str = knob(DEFAULT_SPLIT, "shares of train, validation and test")
    seq_length: int | None = knob(None, "tokens in one sample")
    global_batch_size: int | None = knob(None, "samples in one iteration")
    train_iters: int | None = knob(None, "iterations of the run")
    train_samples: int | None = knob(None, "samples of the run, in place of iterations")

    def __post_init__(self) -> None:
        problems = [] if self.data_path else ["--data-path is needed"]
        if (self.train_iters is None) == (self.train_samples is None):
            problems.append("give either --train-iters (with --global-batch-size) or --train-samples")
        elif self.train_iters is not None and self.global_batch_size is None:
            problems.append("--train-iters needs --global-batch-size")
        if self.seq_length is None:
            problems.append("--seq-length is needed")
        for name in ("seq_length", "global_batch_size", "train_iters", "train_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} ({getattr(self, name)}) must be at least 1")
        if problems:
            raise ConfigError(problems)

    @property
    def samples(self) -> int:
        return self.train_samples or self.train_iters * self.global_batch_size


class Share(NamedTuple):
    """A data set's part in the run."""

    prefix: str
    share: float  # of the run's samples
    documents: int  # of its training split
    tokens: int  # of its training split
    size: int  # bytes of the whole .bin
    samples: int  # that the run takes of it
    drawn: int  # tokens that the run takes of it

    @property
    def repeats(self) -> float:
        """How often the run reads each of its tokens, on average."""
        return self.drawn / self.tokens if self.tokens else math.inf


def parse_blend(words: list[str]) -> tuple[list[float] | None, list[str]]:
    """(weights, prefixes) of a --data-path; weights None if there are none. Raises ValueError for weights that cannot be.

    As in Megatron: an even number of words whose every first is a number are weights and prefixes, all else is prefixes.
    """
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return None, words
    if len(words) % 2:
        return None, words
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"--data-path: weights {weights} must not be negative, and not all 0")
    return weights, words[1::2]


def plan(config: PlanConfig) -> list[Share]:
    """The part of each data set. Raises ValueError or FileNotFoundError for a data set that cannot be read."""
    weights, prefixes = parse_blend(config.data_path)
    found = []
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        ids = split_ranges(parse_split(config.split), len(dataset))[0]
        if ids is None:
            raise ValueError(f"--split {config.split} leaves nothing to training")
        tokens = int(dataset.sequence_lengths[slice(*ids)].sum(dtype=np.int64))
        documents = int(((dataset.document_indices[:-1] >= ids[0]) & (dataset.document_indices[:-1] < ids[1])).sum())
        found.append((prefix, documents, tokens, os.path.getsize(dataset.data_path)))
    weights = [float(tokens) for _, _, tokens, _ in found] if weights is None else weights
    if sum(weights) <= 0:
        raise ValueError(f"no token in the training split of {', '.join(prefixes)}")
    shares = []
    for (prefix, documents, tokens, size), weight in zip(found, weights):
        share = weight / sum(weights)
        samples = math.ceil(config.samples * share)
        if samples and not tokens:
            raise ValueError(f"{prefix} has no token in its training split; leave it out, or change --split")
        shares.append(Share(prefix, share, documents, tokens, size, samples, samples * config.seq_length))
    return shares


def table(shares: list[Share]) -> str:
    """One line a data set, and one for all of them."""
    drawn, tokens = sum(s.drawn for s in shares), sum(s.tokens for s in shares)
    all_of_it = ("all", 1.0, sum(s.documents for s in shares), tokens, sum(s.size for s in shares))
    total = Share(*all_of_it, sum(s.samples for s in shares), drawn)
    rows = [("share", "documents", "tokens there", "bytes", "samples read", "tokens read", "repeats", "data set")]
    for s in [*shares, total]:
        numbers = (f"{s.documents:,}", f"{s.tokens:,}", f"{s.size:,}", f"{s.samples:,}", f"{s.drawn:,}")
        rows.append((f"{100 * s.share:.2f}%", *numbers, f"{s.repeats:.2f}", s.prefix))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return "\n".join("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags, 1 anything else the user can mend."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, PlanConfig)
    try:
        print(table(plan(build(PlanConfig, read_flags(parser, arguments)))))
    except (ValueError, OSError) as error:
        print(f"data_plan: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
