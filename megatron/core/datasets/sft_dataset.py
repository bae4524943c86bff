"""Samples for fine-tuning (--sft): whole examples packed into sequences, none of which sees another.

    FILE.jsonl  --encode, once-->  HASH_sft_document.bin, .idx             tokens, one document an example
                                   HASH_sft_loss_mask_document.bin, .idx   1 where a token gives loss
    each epoch: examples in an order by (seed, epoch), packed one after another into samples of --seq-length tokens

tools/preprocess_data.py --sft writes the same files for large sets, whose prefix ..._sft_document then is the data path.

    tokens        a b c d | e f g | . .       a sample of 9 tokens; an example of n tokens takes n - 1, since its last
    labels        b c d E | f g E | . .       token is only a label
    loss_mask     0 0 1 1 | 0 1 1 | 0 0
    position_ids  0 1 2 3 | 0 1 2 | 0 0
    document_ids  0 0 0 0 | 1 1 1 | 2 2
"""

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.blending_indices_and_dataset import BlendedDataset, normalized, weighted_indices
from megatron.core.datasets.build_datasets import BuildContext, size_problems
from megatron.core.datasets.data_config import DataConfig, sft_mask_prefix
from megatron.core.datasets.encode_sft_records import (
    AN_ARRAY,
    SFTEncoder,
    UnusableRecord,
    fast_tokenizer_of,
    marked_text,
    read_json_line,
)
from megatron.core.datasets.gpt_dataset_and_builder import TokenRules, token_rules
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split, split_ranges
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset, token_dtype
from megatron.core.datasets.token_ids_without_embedding_row import concatenate_checked, tokenizer_name, tokenizer_path
from megatron.core.storage.atomic_file import atomic_file
from megatron.core.tokenizers.chat_template import ChatTemplate
from megatron.core.tokenizers.hf_special_tokens import read_json_object

_TOKENS, _MASK = "_sft_document", "_sft_loss_mask_document"  # ends of the prefixes of token and mask files
_FORMAT = 2  # raise it if the same records give other tokens
_SHOWN_CHARACTERS = 2000  # of the first example
_REASONS = 6  # reasons of unusable lines that are told
_NO_EPOCH = "a blend with weights has no epoch, since its files are repeated as the weights ask; "
_NO_EPOCH += "give --train-iters, or leave the weights out"


# ---------------------------------------------------------------- packing


def pack(slots: np.ndarray, order: np.ndarray, seq_length: int) -> list[np.ndarray]:
    """Return the examples of each sample: those of `order`, each put behind the last one while it fits.

    slots: [examples], tokens of a sample that each takes, at most seq_length.
    """
    taken = slots[order]  # [examples], in order
    samples = []
    first = 0
    ends = np.cumsum(taken)  # [examples]
    while first < len(order):
        before = ends[first] - taken[first]
        past = max(first + 1, int(np.searchsorted(ends, before + seq_length, side="right")))
        samples.append(order[first:past])
        first = past
    return samples


@dataclass(eq=False)
class SFTExamples:
    """The usable examples of one split: which documents of which files, and how many of their tokens."""

    files: list[tuple[IndexedDataset, IndexedDataset]]  # tokens, masks
    places: np.ndarray  # int64 [examples, 2]: file, document
    lengths: np.ndarray  # int64 [examples], tokens that are read

    def __len__(self) -> int:
        return len(self.places)

    def read(self, k: int, rules: TokenRules) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int64 [n], is_trained float32 [n]) of example k. Raises ConfigError for unknown tokens."""
        file, document = self.places[k].tolist()
        tokens, masks = self.files[file]
        length = int(self.lengths[k])
        part = tokens.get(document, 0, length)
        checked = concatenate_checked(
            [part], [(document, 0)], tokens, rules.vocab_size, rules.tokenizer, rules.without_row
        )
        return checked, masks.get(document, 0, length).astype(np.float32)


@dataclass(eq=False)
class SFTDataset:
    """Packed samples, epoch after epoch. num_samples: at least so many; None: those of `epochs` epochs.

    Sample i depends on (examples, seed, i) alone. packs: False gives each example a sample of its own.
    """

    examples: SFTExamples
    seq_length: int
    rules: TokenRules
    seed: int
    num_samples: int | None = None
    epochs: int = 1
    packs: bool = True
    shuffles: bool = True

    def __post_init__(self) -> None:
        self._samples_of = lru_cache(maxsize=2)(self._pack_epoch)
        starts = [0]  # the first sample of each epoch
        while len(starts) <= self.epochs if self.num_samples is None else starts[-1] < self.num_samples:
            starts.append(starts[-1] + len(self._samples_of(len(starts) - 1)))
        self._starts = np.array(starts, np.int64)

    def _pack_epoch(self, epoch: int) -> list[np.ndarray]:
        order = np.arange(len(self.examples))
        if self.shuffles:
            order = np.random.RandomState([self.seed, epoch]).permutation(len(self.examples))
        if not self.packs:
            return list(order[:, None])
        return pack(self.examples.lengths - 1, order, self.seq_length)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return item i: tokens, labels, position_ids, document_ids int64 [s], loss_mask float32 [s].

        Padding is token 0 without loss, a document of its own. Raises IndexError for a number outside the data set.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        epoch = int(np.searchsorted(self._starts, i, side="right")) - 1
        integers = ("tokens", "labels", "position_ids", "document_ids")
        item = {name: np.zeros(self.seq_length, np.int64) for name in integers}
        item["loss_mask"] = np.zeros(self.seq_length, np.float32)
        start = 0
        members = self._samples_of(epoch)[i - int(self._starts[epoch])]
        for number, k in enumerate(members):
            tokens, is_trained = self.examples.read(int(k), self.rules)
            stop = start + len(tokens) - 1
            item["tokens"][start:stop] = tokens[:-1]
            item["labels"][start:stop] = tokens[1:]
            item["loss_mask"][start:stop] = is_trained[1:]
            item["position_ids"][start:stop] = np.arange(len(tokens) - 1)
            item["document_ids"][start:stop] = number
            start = stop
        item["document_ids"][start:] = len(members)
        return item


# ---------------------------------------------------------------- files


def make_encoder(config: DataConfig, tokenizer: Any) -> SFTEncoder:
    """Return the encoder of a run. Raises ConfigError for a template that cannot be read."""
    fast = fast_tokenizer_of(tokenizer)
    template = None
    ends: set[int] = set()
    try:
        if fast is not None:
            template = ChatTemplate.of_tokenizer(fast.path, config.chat_template)
            ends = stop_ids_beside(fast.path)
        elif config.chat_template is not None:
            raise ValueError(
                "--chat-template needs --tokenizer-type HuggingFaceTokenizer, whose tokens tell the characters they stand for"
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return SFTEncoder(tokenizer, template, config.sft_split_turns, frozenset(ends))


def stop_ids_beside(tokenizer_json: str) -> set[int]:
    """Return the ids at which generation ends by the files beside a tokenizer.json."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(os.path.dirname(tokenizer_json), name).get("eos_token_id")
        ids |= {i for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    return ids


def encode_file(
    path: str, prefix: str, encoder: SFTEncoder, progress: Callable[[str], None], vocab_size: int
) -> dict[str, Any]:
    """Write the token and mask files of a file of JSON lines; return the counts and the first example's text.

    Raises ConfigError if no line can be used.
    """
    lines = examples = 0
    reasons: Counter[str] = Counter()
    first_line: dict[str, int] = {}
    first = None
    with contextlib.ExitStack() as stack:
        tokens = stack.enter_context(IndexedDatasetWriter(f"{prefix}{_TOKENS}", token_dtype(vocab_size)))
        masks = stack.enter_context(IndexedDatasetWriter(f"{prefix}{_MASK}", np.uint8))
        for number, line in _lines(path):
            lines += 1
            if lines == 1 and line.lstrip().startswith(b"["):
                raise ConfigError(f"{path}: {AN_ARRAY}")
            try:
                try:
                    encoded = encoder.encode(read_json_line(line))
                except UnusableRecord as error:
                    reason = str(error)
                    reasons[reason] += 1
                    first_line.setdefault(reason, number)
                    continue
            except (ConfigError, ImportError) as error:
                raise ConfigError(f"{path}: {error}") from None
            for example in encoded:
                first = first or marked_text(example, encoder.tokenizer)
                tokens.add_document(example.tokens)
                masks.add_document(example.is_trained)
                examples += 1
        told = unusable_text(reasons, first_line)
        if not examples:
            raise ConfigError(f"{path}: none of its {lines} lines can be used: {told or 'it has no lines'}")
    skipped = sum(reasons.values())
    report = {
        "lines": lines,
        "examples": examples,
        "skipped": skipped,
        "told": told,
        "first": first,
        "form": encoder.form,
    }
    progress(f"{path}: {examples} examples of the form {encoder.form} in {lines} lines")
    return report


def unusable_text(reasons: Counter[str], first_line: dict[str, int]) -> str:
    """Return the reasons of lines that cannot be used, the commonest first."""
    parts = [f"{count} {reason} (line {first_line[reason]})" for reason, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        parts.append(f"and {len(reasons) - _REASONS} more reasons")
    return "; ".join(parts)


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _cached_prefix(path: str, config: DataConfig, encoder: SFTEncoder) -> Path:
    """Return where the encoded form of a file is kept: its name is a hash of all that the tokens depend on.

    --seq-length is not among it: examples are cut and packed as they are read.
    """
    digest = hashlib.sha256()
    _add_file(digest, path)
    template = encoder.template
    fast = encoder.fast
    settings = {
        "format": _FORMAT,
        "template": None if template is None else [template.source, template.special_tokens],
        "split_turns": encoder.split_turns,
        "ends": sorted(encoder.end_ids),
        "eod": encoder.tokenizer.eod,
        "tokenizer": [tokenizer_name(encoder.tokenizer) if fast is None else "", encoder.tokenizer.vocab_size],
        "changes": None if fast is None else fast.hashed_changes,
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    if fast is not None:
        digest.update(fast.library.to_str().encode())  # with merges and patterns that the file alone does not hold
    else:
        model = tokenizer_path(encoder.tokenizer)
        if model is not None and Path(model).is_file():
            _add_file(digest, model)
    folder = Path(config.data_cache_path or Path(path).resolve().parent / "cache")
    return folder / "SFTDataset" / digest.hexdigest()[:32]


def _add_file(digest: Any, path: str) -> None:
    """Add the bytes of a file to a hash."""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


def _encode_once(path: str, prefix: Path, encoder: SFTEncoder, build: BuildContext) -> None:
    """Encode a file unless its cache is there, and tell what it holds."""
    description = Path(f"{prefix}.json")
    if not description.is_file():
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            report = encode_file(path, str(prefix), encoder, build.progress, encoder.tokenizer.vocab_size)
            with atomic_file(str(description)) as file:  # last: it says that the files are complete
                file.write(json.dumps(report).encode())
        except OSError as error:
            raise ConfigError(
                f"{path}: its tokens cannot be written to {prefix.parent} ({error.strerror}); give another folder with "
                "--data-cache-path"
            ) from None
    report = json.loads(description.read_text())
    if report["skipped"]:
        build.say(f"{path}: {report['skipped']} of {report['lines']} lines cannot be used: {report['told']}")
    first = report["first"]
    if len(first) > _SHOWN_CHARACTERS:
        first = f"{first[:_SHOWN_CHARACTERS]} .. ({len(first)} characters)"
    build.progress(f"the first example, with what is trained between >>> and <<<:\n{first}")


# ---------------------------------------------------------------- data sets


def build_sft_datasets(
    config: DataConfig, tokenizer: Any, num_samples: list[int | None], seed: int, *, epochs: int = 1, **building: Any
) -> tuple[SFTDataset | BlendedDataset | None, ...]:
    """Build (train, valid, test) for --sft; None for a split without a share or of which no samples are requested.

    Files without weights are packed as one; of a blend with weights each is packed alone, and gives its share of the samples.
    num_samples: of each split; None: `epochs` epochs of training, one of validation. building: the fields of `BuildContext`.
    One process encodes the files, the others wait; every process calls. Raises ConfigError for data that cannot be used.
    """
    build = BuildContext(**building)
    problems = [] if config.seq_length else ["no sequence length; set --seq-length"]
    problems += size_problems(num_samples, made_up=False)
    if problems:
        raise ConfigError(problems)
    rules = token_rules(config, tokenizer)
    blends = config.blends()
    opened = encode_and_open(config, tokenizer, build)
    shares = (1.0, 1.0, 1.0) if config.has_own_splits else parse_split(config.split_shares)
    datasets: list[SFTDataset | BlendedDataset | None] = []
    for number, (split, blend, count) in enumerate(zip(SPLIT_NAMES, blends, num_samples)):
        if blend is None or count == 0 or shares[number] == 0:
            datasets.append(None)
            continue
        parts = [blend.prefixes]
        counts = [count]
        indices = None
        if blend.weights is not None:
            if count is None:
                raise ConfigError(f"{split}: {_NO_EPOCH}")
            parts = [(path,) for path in blend.prefixes]
            indices = weighted_indices(normalized(blend.weights), count)
            counts = np.bincount(indices.dataset_index, minlength=len(parts)).tolist()
        share = None if config.has_own_splits else (shares, number)
        of_parts = []
        for paths, part_count in zip(parts, counts, strict=True):
            left_out, cut, examples = _examples_of_split([opened[path] for path in paths], share, config.seq_length)
            name = split if len(parts) == 1 else f"{split}, {paths[0]}"
            if left_out or cut:
                build.progress(
                    f"{name}: with --seq-length {config.seq_length}, {cut} examples are cut at the end of an answer and "
                    f"{left_out} are left out, of which no answer begins within it"
                )
            if not len(examples):
                what = f"the {split} split of {', '.join(paths)} has no examples"
                if split == "train":
                    raise ConfigError(f"{what}; use more data, a larger --seq-length or a larger share of --split")
                build.say(f"{what}: it is left out")
                of_parts = []
                break
            dataset = SFTDataset(
                examples,
                config.seq_length,
                rules,
                seed,
                part_count,
                epochs if split == "train" else 1,
                config.sft_packing,
                split == "train",
            )
            of_parts.append(dataset)
            per_epoch = len(dataset._samples_of(0))
            used = int((examples.lengths - 1).sum()) / (per_epoch * config.seq_length)
            build.progress(
                f"{name}: {len(examples)} examples in {per_epoch} samples an epoch, {used:.0%} of their tokens used"
            )
        if not of_parts:
            datasets.append(None)
        elif indices is None:
            datasets.append(of_parts[0])
        else:
            datasets.append(BlendedDataset(of_parts, indices, list(blend.prefixes)))
    return tuple(datasets)


def encode_and_open(
    config: DataConfig, tokenizer: Any, build: BuildContext, *, polls: bool = False, paths: Sequence[str] | None = None
) -> dict[str, tuple[IndexedDataset, IndexedDataset]]:
    """Return (tokens, masks) of each data path. The builder encodes; the others wait, with `polls` for its files.

    paths: default: those of the config. Raises ConfigError.
    """
    if paths is None:
        if problems := config.missing_files():
            raise ConfigError(problems)
        paths = [path for blend in config.blends() if blend is not None for path in blend.prefixes]
    paths = list(dict.fromkeys(paths))
    encoder = make_encoder(config, tokenizer)
    prefixes: dict[str, str] = {}
    try:
        for path in paths:
            prefixes[path] = path
            if sft_mask_prefix(path) is not None:
                continue
            prefix = _cached_prefix(path, config, encoder)
            prefixes[path] = f"{prefix}{_TOKENS}"
            if build.is_builder:
                encoder.form = None
                _encode_once(path, prefix, encoder, build)
            while polls and not build.is_builder and not Path(f"{prefix}.json").is_file():
                time.sleep(0.2)  # the launcher ends this process if the builder fails
    finally:
        if encoder.template is not None:
            encoder.template.close()
        build.wait()  # also after an error, or the other processes would wait forever

    opened = {}
    for path, prefix in prefixes.items():
        try:
            opened[path] = (IndexedDataset(prefix), IndexedDataset(sft_mask_prefix(prefix)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: its tokens could not be made or read ({error})") from None
    return opened


def samples_of_epochs(config: DataConfig, tokenizer: Any, seed: int, epochs: int, *, is_builder: bool) -> int:
    """Return the training samples of so many epochs, before any process group exists. The builder encodes the files."""
    build = BuildContext(is_builder=is_builder, say=lambda line: None)
    opened = encode_and_open(config, tokenizer, build, polls=True)
    blend = config.blends()[0]
    if blend is None:
        raise ConfigError("no training data: give --data-path or --train-data-path")
    if blend.weights is not None:
        raise ConfigError(f"--epochs {epochs}: {_NO_EPOCH}")
    share = None if config.has_own_splits else (parse_split(config.split_shares), 0)
    _, _, examples = _examples_of_split([opened[path] for path in blend.prefixes], share, config.seq_length)
    if not len(examples):
        raise ConfigError(
            f"{', '.join(blend.prefixes)} have no training examples; use more data or a larger --seq-length"
        )
    rules = token_rules(config, tokenizer)
    return len(SFTDataset(examples, config.seq_length, rules, seed, None, epochs, config.sft_packing))


def _examples_of_split(
    files: list[tuple[IndexedDataset, IndexedDataset]], share: tuple[Any, int] | None, seq_length: int
) -> tuple[int, int, SFTExamples]:
    """Return `examples_in` of a split. share: (the shares of all splits, the split's number); None: all documents."""
    spans = []
    for tokens, _ in files:
        span = (0, len(tokens))
        if share is not None:
            shares, number = share
            span = split_ranges(shares, len(tokens))[number] or (0, 0)
        spans.append(range(*span))
    return examples_in(files, spans, seq_length)


def examples_in(
    files: list[tuple[IndexedDataset, IndexedDataset]], documents: Sequence[Iterable[int]], seq_length: int
) -> tuple[int, int, SFTExamples]:
    """Return (examples left out, examples cut, the examples among these documents of each file).

    An example of more than seq_length + 1 tokens is cut after the last answer that is whole; the first answer is cut itself
    where it does not fit.
    """
    places, lengths = [], []
    left_out = cut = 0
    for file, (tokens, masks) in enumerate(files):
        if len(tokens) != len(masks) or not np.array_equal(tokens.sequence_lengths, masks.sequence_lengths):
            raise ConfigError(f"{tokens.prefix} and {masks.prefix} do not belong together: make them again")
        for document in documents[file]:
            length = int(tokens.sequence_lengths[document])
            if length > seq_length + 1:
                length = _whole_answers(masks.get(document, 0, seq_length + 2), seq_length + 1)
                cut += length > 0
                left_out += length == 0
            if length > 1:
                places.append((file, document))
                lengths.append(length)
    return left_out, cut, SFTExamples(files, np.array(places, np.int64).reshape(-1, 2), np.array(lengths, np.int64))


def _whole_answers(is_trained: np.ndarray, longest: int) -> int:
    """Return how many of at most `longest` tokens to keep, so that they end with an answer; 0: no answer begins in them.

    is_trained: uint8 [longest + 1].
    """
    ends = np.flatnonzero(np.diff(is_trained.astype(np.int8)) == -1) + 1  # the token behind each answer
    if len(ends):
        return int(ends[-1])
    return longest if is_trained[1:longest].any() else 0
