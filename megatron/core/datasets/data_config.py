"""The options of the training data."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, NotNegative, WholeNumber, flag_of, option
from megatron.core.datasets.blend import Blend, parse_blend
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split

DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"
_OWN = tuple(f"{split}_data_path" for split in SPLIT_NAMES)
DATA_SOURCES = {
    "--data-path": ("data_path",),
    "--data-args-path": ("data_args_path",),
    "--train-data-path, --valid-data-path or --test-data-path": _OWN,
    "--per-split-data-args-path": ("per_split_data_args_path",),
    "--mock-data": ("mock_data",),
}  # flags that say where data come from, and their fields


@dataclass(frozen=True)
class DataConfig(FlagConfig):
    """Training data."""

    data_path: list[str] | None = option(
        None,
        "prefix of PREFIX.bin and PREFIX.idx from tools/preprocess_data.py; a blend: 0.3 A 0.7 B, or A B C",
        metavar="PREFIX",
    )
    train_data_path: list[str] | None = option(None, "prefix or blend for training only", metavar="PREFIX")
    valid_data_path: list[str] | None = option(None, "prefix or blend for validation only", metavar="PREFIX")
    test_data_path: list[str] | None = option(None, "prefix or blend for testing only", metavar="PREFIX")
    data_args_path: str | None = option(None, "file with the value of --data-path; # starts a comment", metavar="FILE")
    per_split_data_args_path: str | None = option(
        None, 'JSON file {"train": [..], "valid": [..], "test": [..]} of blends', metavar="FILE"
    )
    split: str | None = option(
        None,
        f"shares of train, validation and test; unset: {DEFAULT_SPLIT}; without effect on mock data",
        metavar="X,X,X",
    )
    seq_length: Count | None = option(
        None, "tokens per sample", flags=("--seq-length", "--encoder-seq-length"), required=True
    )
    decoder_seq_length: Count | None = option(None, "pretrain_t5.py: tokens per sample of the decoder")
    data_cache_path: str | None = option(
        None, "folder for index files; default: PREFIX/cache/GPTDataset_indices", metavar="DIR"
    )
    mid_level_dataset_surplus: NotNegative = option(
        0.005, "share of extra samples built for each data set of a blend", metavar="X"
    )
    mmap_bin_files: bool = option(True, "read token files with ordinary reads instead of memory mapping")
    epoch_stable_order: bool = option(
        False, "shuffle each epoch separately: a longer run keeps the order (Megatron's order depends on the length)"
    )
    dataloader_type: Literal["single", "cyclic", "external"] = option(
        "single", "single: one pass; cyclic: reshuffled epochs; external: the script's own loader"
    )
    num_workers: WholeNumber = option(1, "prefetch threads per rank; 0: read samples on demand")
    mock_data: bool = option(False, "train on synthetic, learnable tokens instead of files")
    eod_mask_loss: bool = option(False, "mask the loss where the input is the end-of-document token")
    reset_position_ids: bool = option(
        False, "restart position ids after each end-of-document token, and rotary angles with them"
    )
    reset_attention_mask: bool = option(False, "attend within a document only")
    full_validation: bool = option(
        False, "each validation reads every sample of the validation set once, instead of --eval-iters batches"
    )
    multiple_validation_sets: bool = option(
        False, "evaluate each prefix of --valid-data-path on its own, with a loss for each; the list has no weights"
    )
    validation_set_names: list[str] | None = option(
        None, "names of the sets of --multiple-validation-sets in logs; default: 0, 1, ...", metavar="NAME"
    )

    def problems(self) -> Iterator[str]:
        for name in ("data_path", *_OWN):
            yield from (f"{flag_of(name)}: {problem}" for problem in _blend_problems(getattr(self, name)))
        if self.has_own_splits and self.split is not None:
            yield f"--split {self.split} has no meaning with data of each split's own; leave it out"
        if self.split is not None:
            try:
                parse_split(self.split)
            except ValueError as error:
                yield str(error)
        yield from self._problems_of_several_sets()

    def _problems_of_several_sets(self) -> Iterator[str]:
        names, external = self.validation_set_names, self.dataloader_type == "external"
        if names is not None and not self.multiple_validation_sets:
            yield "--validation-set-names names the sets of --multiple-validation-sets; give both, or leave it out"
        if names is not None and (twice := sorted({name for name in names if names.count(name) > 1})):
            yield f"--validation-set-names gives {', '.join(twice)} twice; each set needs a name of its own"
        if self.multiple_validation_sets and not (self.valid_data_path or self.per_split_data_args_path):
            yield (
                "--multiple-validation-sets needs files of validation's own: give --valid-data-path A B, or a "
                "list under valid "
                "in --per-split-data-args-path"
            )
        for name in ("full_validation", "multiple_validation_sets"):
            if getattr(self, name) and external:
                yield (
                    f"{flag_of(name)} counts the samples of a set, and a loader of --dataloader-type external does not tell "
                    "them; leave one of them out"
                )

    def validation_problems(self) -> list[str]:
        """What the validation files contradict; reads the lists that files hold. Needs data without `source_problems`."""
        blend = None if self.mock_data else self.blends()[1]
        if blend is None:
            return []
        several, names = self.multiple_validation_sets, self.validation_set_names
        weights = " ".join(f"{weight:g}" for weight in blend.weights or ())
        is_blend = len(blend.prefixes) > 1 or not self.has_own_splits
        problems = []
        if weights and several:
            problems.append(
                f"--multiple-validation-sets evaluates each set on its own, and the validation list has weights ({weights}); "
                "leave the weights out"
            )
        elif weights and is_blend and self.full_validation:
            problems.append(
                f"--full-validation reads a set to its end, and a validation blend with weights ({weights}) has none; leave the "
                "weights of --valid-data-path out, or give --multiple-validation-sets"
            )
        if several and names is not None and len(names) != len(blend.prefixes):
            problems.append(
                f"--validation-set-names gives {len(names)} names ({' '.join(names)}), and there are {len(blend.prefixes)} "
                f"validation sets ({' '.join(blend.prefixes)}); give one for each"
            )
        return problems

    @property
    def split_shares(self) -> str:
        """The split string in force."""
        return MOCK_SPLIT if self.mock_data else self.split or DEFAULT_SPLIT

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        divides_nothing = self.mock_data and self.split is not None
        return {"--split": "made-up data have as many samples of each kind as are asked for"} if divides_nothing else {}

    @property
    def tokens_per_sample(self) -> int | None:
        """Of the encoder and the decoder together, where a model has both."""
        return self.seq_length and self.seq_length + (self.decoder_seq_length or 0)

    @property
    def has_own_splits(self) -> bool:
        """Whether train, validation and test come from files of their own, each used whole."""
        return any(getattr(self, name) is not None for name in (*_OWN, "per_split_data_args_path"))

    def blends(self) -> tuple[Blend | None, Blend | None, Blend | None]:
        """The data of train, validation and test; None for a split without any.

        Reads the file of --data-args-path or --per-split-data-args-path. Raises ConfigError if it cannot be used.
        """
        if self.per_split_data_args_path:
            given = _read_split_lists(self.per_split_data_args_path)
        elif self.has_own_splits:
            given = [getattr(self, name) for name in _OWN]
        else:
            given = [_read_words(self.data_args_path) if self.data_args_path else self.data_path] * 3
        if problems := dict.fromkeys(problem for words in given if words for problem in _blend_problems(words)):
            raise ConfigError(list(problems))
        return tuple(parse_blend(words) if words else None for words in given)  # type: ignore[return-value]

    def source_problems(self, *, needed: bool = True) -> list[str]:
        """Why it is not clear where data come from; reads the lists that files hold. needed: there must be some."""
        given = {flag: [getattr(self, name) for name in names] for flag, names in DATA_SOURCES.items()}
        sources = [flag for flag, values in given.items() if any(value not in (None, False) for value in values)]
        if len(sources) > 1:
            return [f"{' and '.join(sources)} exclude each other; give one"]
        if self.mock_data:
            return []
        if not sources:
            return ["no data: give --data-path PREFIX, or --mock-data to try things out"] if needed else []
        try:
            return [] if self.blends()[0] else ["no training data: give --train-data-path"]
        except ConfigError as error:
            return error.problems

    def missing_files(self) -> list[str]:
        """A line for each prefix without files on this host's disks; none while `source_problems` are there."""
        if self.mock_data or self.source_problems():
            return []
        return list(dict.fromkeys(problem for blend in self.blends() if blend for problem in blend.missing_files()))


def _blend_problems(words: list[str] | None) -> list[str]:
    if words is None:
        return []
    return parse_blend(words).problems() if words else ["nothing is given; name a prefix"]


def _read_words(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # without the mark that some editors put first
        return re.sub(r"(?m)(?<!\S)#.*", "", text).split()  # a word that begins with # begins a comment
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, the list of data, cannot be read ({error}); give a text file") from None


def _read_split_lists(path: str) -> list[list[str] | None]:
    try:
        lists = json.loads(Path(path).read_text())
        known = isinstance(lists, dict) and set(lists) <= set(SPLIT_NAMES)
        if not known or not all(isinstance(words, list | None) for words in lists.values()):
            raise ValueError("it is not an object with lists under train, valid and test")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, the lists of data, cannot be read ({error}); give a JSON file") from None
    return [[str(word) for word in lists[split]] if lists.get(split) else None for split in SPLIT_NAMES]
