"""The settings of the training data: which files, how they are split, and how samples are read."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, NotNegative, WholeNumber, flag_of, option
from megatron.core.base.warn_waiting_on_named_pipe import told_if_nobody_writes
from megatron.core.datasets.blending_indices_and_dataset import Blend, missing_file_problem, parse_blend
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split

DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"
_SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
# The flags that say where data come from, and their fields.
DATA_SOURCES = {
    "--data-path": ("data_path",),
    "--data-args-path": ("data_args_path",),
    "--train-data-path, --valid-data-path or --test-data-path": _SPLIT_PATHS,
    "--per-split-data-args-path": ("per_split_data_args_path",),
    "--mock-data": ("mock_data",),
}


@dataclass(frozen=True)
class DataConfig(FlagConfig):
    """Training data."""

    data_path: list[str] | None = option(
        None,
        "prefix of PREFIX.bin and PREFIX.idx from tools/preprocess_data.py; or a blend of several, with weights (0.3 "
        "A 0.7 B) or without (A B C)",
        metavar="PREFIX",
    )
    train_data_path: list[str] | None = option(
        None, "prefix or blend of the training data, instead of --data-path with --split", metavar="PREFIX"
    )
    valid_data_path: list[str] | None = option(
        None, "prefix or blend of the validation data, instead of --data-path with --split", metavar="PREFIX"
    )
    test_data_path: list[str] | None = option(
        None, "prefix or blend of the test data, instead of --data-path with --split", metavar="PREFIX"
    )
    data_args_path: str | None = option(
        None, "text file with the value of --data-path; # begins a comment", metavar="FILE"
    )
    per_split_data_args_path: str | None = option(
        None, 'JSON file of blends, one list per split: {"train": [..], "valid": [..], "test": [..]}', metavar="FILE"
    )
    split: str | None = option(
        None,
        f"shares of train, validation and test data, such as 969,30,1; default: {DEFAULT_SPLIT}; has no effect on "
        "mock data",
        metavar="X,X,X",
    )
    seq_length: Count | None = option(
        None, "tokens per sample", flags=("--seq-length", "--encoder-seq-length"), required=True
    )
    decoder_seq_length: Count | None = option(None, "pretrain_t5.py: tokens per sample of the decoder")
    data_cache_path: str | None = option(
        None, "folder for cached index files; default: PREFIX/cache/GPTDataset_indices", metavar="DIR"
    )
    mid_level_dataset_surplus: NotNegative = option(
        0.005, "extra samples to build for each data set of a blend, as a share of its samples", metavar="X"
    )
    mmap_bin_files: bool = option(True, "read the token files (.bin) with ordinary reads instead of memory mapping")
    epoch_stable_order: bool = option(
        False,
        "shuffle each epoch separately, so that a longer run reads the samples in the same order (Megatron's "
        "order depends on the length of the run)",
    )
    dataloader_type: Literal["single", "cyclic", "external"] = option(
        "single",
        "order of samples: single: one pass; cyclic: reshuffled in each epoch; external: the script's own data loader",
    )
    num_workers: WholeNumber = option(1, "prefetch threads per rank; 0: read samples on demand")
    mock_data: bool = option(False, "train on synthetic, learnable tokens instead of files")
    eod_mask_loss: bool = option(False, "mask the loss where the input is the end-of-document token")
    reset_position_ids: bool = option(
        False, "restart position ids, and with them rotary angles, after each end-of-document token"
    )
    reset_attention_mask: bool = option(False, "attend within a document only")
    sft: bool = option(
        False,
        "fine-tune on conversations or prompts with answers: data paths are files of JSON lines, or prefixes of "
        "tools/preprocess_data.py --sft; loss on the answers only; packed examples do not see each other",
    )
    sft_packing: bool = option(True, "with --sft: one example per sample instead of as many as fit")
    sft_split_turns: bool = option(
        False,
        "with --sft: make each answer of a conversation an example of its own, for chat templates that render earlier "
        "turns otherwise than the last one",
    )
    chat_template: str | None = option(
        None, "with --sft: chat template (Jinja) instead of that of the tokenizer's folder", metavar="FILE"
    )
    dataloader_inter_document_masking: bool = option(
        False,
        "attend within a document only and restart position ids at each document, where documents are those of the data "
        "files, whether or not they end with a token",
    )
    full_validation: bool = option(
        False, "each validation reads every sample of the validation set once, instead of --eval-iters batches"
    )
    multiple_validation_sets: bool = option(
        False,
        "treat each prefix of --valid-data-path as a validation set of its own and report a loss for each; "
        "the list must have no weights",
    )
    validation_set_names: list[str] | None = option(
        None,
        "names of the validation sets in the logs, with --multiple-validation-sets; default: 0, 1, ...",
        metavar="NAME",
    )

    @property
    def masks_documents(self) -> bool:
        """Whether a token attends to its own document only."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking

    def problems(self) -> Iterator[str]:
        for name in ("data_path", *_SPLIT_PATHS):
            for problem in _blend_problems(getattr(self, name)):
                yield f"{flag_of(name)}: {problem}"
        if self.split is not None:
            if self.has_own_splits:
                yield f"--split {self.split} has no effect if each split has data of its own; leave it out"
            try:
                parse_split(self.split)
            except ValueError as error:
                yield str(error)
        yield from self._validation_set_problems()
        yield from self._sft_problems()

    def _sft_problems(self) -> Iterator[str]:
        if not self.sft:
            return
        for name in ("reset_position_ids", "reset_attention_mask"):
            if not getattr(self, name):
                yield (
                    f"--sft needs {flag_of(name)}, so that packed examples do not see each other (the command line sets it); "
                    f"build the DataConfig with {name}=True"
                )
        if self.mock_data:
            yield "--sft reads examples, and --mock-data has none; leave one of them out"
        if self.multiple_validation_sets:
            yield "--sft reads its validation files as one set; leave --multiple-validation-sets out"

    def _validation_set_problems(self) -> Iterator[str]:
        names = self.validation_set_names
        if names is not None:
            if not self.multiple_validation_sets:
                yield "--validation-set-names needs --multiple-validation-sets; give both, or leave it out"
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                yield f"--validation-set-names gives {', '.join(repeated)} twice; give each set a name of its own"
        if self.multiple_validation_sets and not (self.valid_data_path or self.per_split_data_args_path):
            yield (
                "--multiple-validation-sets needs validation data of its own; give --valid-data-path A B, or a list "
                "under valid in --per-split-data-args-path"
            )
        if self.dataloader_type == "external":
            for name in ("full_validation", "multiple_validation_sets"):
                if getattr(self, name):
                    yield (
                        f"{flag_of(name)} needs the number of samples, which --dataloader-type external does not "
                        "tell; leave one of them out"
                    )

    def validation_problems(self) -> list[str]:
        """Return contradictions between the settings of validation and its files.

        Reads the lists that files hold. Call it only when `source_problems` is empty.
        """
        if self.mock_data:
            return []
        _, blend, _ = self.blends()
        if blend is None:
            return []
        weights = " ".join(f"{weight:g}" for weight in blend.weights or ())
        is_blend = len(blend.prefixes) > 1 or not self.has_own_splits
        problems = []
        if weights and self.multiple_validation_sets:
            problems.append(
                f"--multiple-validation-sets evaluates each set on its own, and the validation list has weights ({weights}); "
                "leave the weights out"
            )
        elif weights and is_blend and self.full_validation:
            problems.append(
                f"--full-validation reads a set to its end, and a validation blend with weights ({weights}) has none; leave the "
                "weights of --valid-data-path out, or give --multiple-validation-sets"
            )
        names = self.validation_set_names
        if self.multiple_validation_sets and names is not None and len(names) != len(blend.prefixes):
            problems.append(
                f"--validation-set-names gives {len(names)} names ({' '.join(names)}), and there are {len(blend.prefixes)} "
                f"validation sets ({' '.join(blend.prefixes)}); give one for each"
            )
        return problems

    @property
    def split_shares(self) -> str:
        """The shares of train, validation and test that hold, as --split writes them."""
        if self.mock_data:
            return MOCK_SPLIT
        return self.split or DEFAULT_SPLIT

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        unused = {}
        if self.mock_data and self.split is not None:
            unused["--split"] = "made-up data have as many samples of each kind as are asked for"
        of_texts = {"--sft-split-turns": self.sft_split_turns, "--chat-template": self.chat_template is not None}
        paths = [path for name in ("data_path", *_SPLIT_PATHS) for path in getattr(self, name) or ()]
        why = ""
        if not self.sft:
            why = "only --sft reads examples"
            if not self.sft_packing:
                unused["--no-sft-packing"] = why
        elif paths and all(sft_mask_prefix(path) is not None for path in paths):
            why = "the examples are tokens already; give it to tools/preprocess_data.py"
        if why:
            unused |= {flag: why for flag, given in of_texts.items() if given}
        return unused

    @property
    def tokens_per_sample(self) -> int | None:
        """The tokens of a sample: of the encoder and the decoder together, where a model has both."""
        return self.seq_length and self.seq_length + (self.decoder_seq_length or 0)

    @property
    def has_own_splits(self) -> bool:
        """Whether train, validation and test come from files of their own, each used in full."""
        return any(getattr(self, name) is not None for name in (*_SPLIT_PATHS, "per_split_data_args_path"))

    def blends(self) -> tuple[Blend | None, Blend | None, Blend | None]:
        """Return the data of train, validation and test; None for a split without any.

        Reads the file of --data-args-path or --per-split-data-args-path. Raises ConfigError if it cannot be used.
        """
        # the words of each split's list
        if self.per_split_data_args_path:
            lists = _read_split_lists(self.per_split_data_args_path)
        elif self.has_own_splits:
            lists = [getattr(self, name) for name in _SPLIT_PATHS]
        elif self.data_args_path:
            lists = [_read_words(self.data_args_path)] * 3
        else:
            lists = [self.data_path] * 3

        # problems of the lists, each once: all splits may have the same list
        problems: dict[str, None] = {}  # a dict, to keep the order
        for words in lists:
            if words:
                problems |= dict.fromkeys(_blend_problems(words))
        if problems:
            raise ConfigError(list(problems))
        return tuple(parse_blend(words) if words else None for words in lists)  # type: ignore[return-value]

    def source_problems(self, *, needed: bool = True, trains: bool = True) -> list[str]:
        """Return problems with the flags that say where data come from; reads the lists that files hold.

        needed: no such flag is a problem too. trains: no data for training are a problem too.
        """
        sources = []
        for flag, names in DATA_SOURCES.items():
            if any(getattr(self, name) not in (None, False) for name in names):
                sources.append(flag)
        if len(sources) > 1:
            return [f"{' and '.join(sources)} exclude each other; give one"]
        if self.mock_data:
            return []
        if not sources:
            return ["no data: give --data-path PREFIX, or --mock-data to try things out"] if needed else []
        try:
            train, _, _ = self.blends()
        except ConfigError as error:
            return error.problems
        return [] if train or not trains else ["no training data: give --train-data-path"]

    def missing_files(self) -> list[str]:
        """Return a line for each prefix without files on this host's disks; none if there are `source_problems`."""
        if self.mock_data or self.source_problems(trains=False):
            return []
        problems: dict[str, None] = {}  # a dict, to keep the order and name each file once
        for blend in self.blends():
            if blend is not None and self.sft:
                problems |= dict.fromkeys(_sft_file_problems(blend))
            elif blend is not None:
                problems |= dict.fromkeys(blend.missing_files())
        return list(problems)


_SFT_TOKENS = "_sft_document"  # end of a prefix of tokens; the masks of their losses are beside it
_SFT_MASKS = "_sft_loss_mask_document"


def sft_mask_prefix(prefix: str) -> str | None:
    """Return the prefix of the loss masks that belong to a prefix of tokens for --sft; None for a file of JSON lines."""
    return prefix.removesuffix(_SFT_TOKENS) + _SFT_MASKS if prefix.endswith(_SFT_TOKENS) else None


def _sft_file_problems(blend: Blend) -> Iterator[str]:
    """Yield a line for each data path of --sft that cannot be read."""
    for path in blend.prefixes:
        masks = sft_mask_prefix(path)
        problem = None
        if masks is not None:
            problem = missing_file_problem(path) or missing_file_problem(masks)
        elif not os.path.isfile(path):
            of_tool = "a prefix of tools/preprocess_data.py --sft"
            what = "it is a folder" if os.path.isdir(path) else "there is no such file"
            problem = f"{what}; --sft reads JSON lines, or {of_tool}, PREFIX{_SFT_TOKENS}"
        elif os.path.getsize(path) == 0:
            problem = "is empty; give a file with an example a line"
        if problem is not None:
            yield f"--data-path {path}: {problem}"


def _blend_problems(words: list[str] | None) -> list[str]:
    if words is None:
        return []
    if not words:
        return ["nothing is given; name a prefix"]
    return parse_blend(words).problems()


def _read_words(path: str) -> list[str]:
    """Read the words of a text file without its comments. Raises ConfigError."""
    try:
        with told_if_nobody_writes(path, "--data-args-path"):
            text = Path(path).read_text(encoding="utf-8-sig")  # without the byte order mark that some editors put first
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, the file of --data-args-path, cannot be read ({error}); give a text file") from None
    without_comments = re.sub(r"(?m)(?<!\S)#.*", "", text)  # a word that begins with # begins a comment
    return without_comments.split()


def _read_split_lists(path: str) -> list[list[str] | None]:
    """Read the lists of train, valid and test of a JSON file; None for one that is missing or empty.

    Raises ConfigError.
    """
    try:
        with told_if_nobody_writes(path, "--per-split-data-args-path"):
            lists = json.loads(Path(path).read_text())
        is_valid = isinstance(lists, dict) and set(lists) <= set(SPLIT_NAMES)
        if not is_valid or not all(isinstance(words, list | None) for words in lists.values()):
            raise ValueError("it must be an object with the lists train, valid and test")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, the file of --per-split-data-args-path, cannot be read ({error}); give a JSON file"
        ) from None
    result: list[list[str] | None] = []
    for split in SPLIT_NAMES:
        words = lists.get(split)
        result.append([str(word) for word in words] if words else None)
    return result
