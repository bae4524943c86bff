"""The data sets that a validation or test evaluates, each with its name in the log, and how one is read to its end.

No torch. A set that is read whole is padded with rows that count nothing, so that every rank has complete microbatches:

    9 samples, microbatches of 2, 2 data-parallel ranks     0 1 | 2 3 | 4 5 | 6 7 | 8 - | - -
                                                            rank0 rank1 rank0 rank1 rank0 rank1

The samples of a microbatch are the same on any number of ranks, so the loss is too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_parallel_sampler_and_loader import Samples


@dataclass(eq=False)
class PaddedSet:
    """`samples`, padded to a multiple of `block` with rows that count nothing.

    Such a row is sample 0 again, its `loss_mask` all zeros.
    """

    samples: Samples
    block: int

    def __len__(self) -> int:
        blocks = -(-len(self.samples) // self.block)  # rounded up
        return blocks * self.block

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return item i, with the keys and shapes of `samples`, such as tokens [s]."""
        if i < len(self.samples):
            return self.samples[i]
        item = dict(self.samples[0])
        item["loss_mask"] = item["loss_mask"] * 0
        return item

    @property
    def has_empty_rows(self) -> bool:
        return len(self) > len(self.samples)


@dataclass(frozen=True)
class EvaluatedSet:
    """A data set that is evaluated.

    name: `validation`, `validation-wiki` for one of several, or `test`. is_whole: read to its end each time.
    """

    split: str
    name: str
    samples: Any
    is_whole: bool = False


def evaluated_sets(split: str, dataset: Any, data: DataConfig, samples_at_once: int) -> list[EvaluatedSet]:
    """Return the sets of `split`, which are evaluated one after another.

    dataset: the script's provider returned it for this split. samples_at_once: samples of one microbatch over all
    data-parallel ranks. Raises ConfigError for a set that cannot be read whole.
    """
    is_valid = split == "valid"
    by_suffix = {"": dataset}
    if is_valid and data.multiple_validation_sets:
        by_suffix = _by_suffix(dataset, data)
    sets = []
    for suffix, samples in by_suffix.items():
        name = f"{'validation' if is_valid else split}{suffix}"
        if samples is None:
            continue
        if is_valid and data.full_validation:
            sets.append(EvaluatedSet(split, name, _padded(samples, name, samples_at_once), is_whole=True))
        else:
            sets.append(EvaluatedSet(split, name, samples))
    return sets


def _by_suffix(dataset: Any, data: DataConfig) -> dict[str, Any]:
    """Return the sets of --multiple-validation-sets by the suffix of their names, as in Megatron: -0, -1, or -NAME."""
    sets = dataset if isinstance(dataset, list) else [dataset]
    names = data.validation_set_names or [str(number) for number in range(len(sets))]
    if len(names) != len(sets):
        raise ConfigError(
            f"--validation-set-names gives {len(names)} names ({' '.join(names)}), but the script provides "
            f"{len(sets)} validation sets; give one name for each"
        )
    return {f"-{name}": samples for name, samples in zip(names, sets)}


def _padded(samples: Samples, name: str, samples_at_once: int) -> PaddedSet:
    if not len(samples):
        raise ConfigError(f"the {name} set has no samples for --full-validation; use more data")
    padded = PaddedSet(samples, samples_at_once)
    if padded.has_empty_rows and "loss_mask" not in samples[0]:
        raise ConfigError(
            f"--full-validation: the {name} set has {len(samples)} samples, not a multiple of {samples_at_once} "
            "(--micro-batch-size x data-parallel size), so the last batch must be padded; without a loss_mask in the "
            "samples the padding would count; leave out --full-validation"
        )
    return padded


def reason_left_out(evaluated: EvaluatedSet, batch_size: int) -> str | None:
    """Return why a set is left out, since it is smaller than a global batch; None if it is not left out."""
    if evaluated.is_whole or len(evaluated.samples) >= batch_size:
        return None
    split = "valid" if evaluated.name == "validation" else evaluated.name
    return f"{split} set of {len(evaluated.samples)} samples is left out: a global batch has {batch_size}"


def evaluated_set_notes(sets: Mapping[str, Sequence[EvaluatedSet]], data: DataConfig, batch_size: int) -> list[str]:
    """Return the log lines about the sets at the start of a run. sets: by split.

    The lines name the sets that are left out, and with --multiple-validation-sets each set with its size and its file.
    """
    # the sets that are left out
    lines = []
    for sets_of_split in sets.values():
        for evaluated in sets_of_split:
            reason = reason_left_out(evaluated, batch_size)
            if reason is not None:
                lines.append(reason)

    # each of several validation sets
    validation_sets = sets["valid"]
    if not validation_sets or not data.multiple_validation_sets:
        return lines
    blend = data.blends()[1]
    prefixes = [] if blend is None else list(blend.prefixes)
    if len(prefixes) != len(validation_sets):  # the files are not known
        prefixes = [""] * len(validation_sets)
    for evaluated, prefix in zip(validation_sets, prefixes):
        samples = evaluated.samples.samples if evaluated.is_whole else evaluated.samples  # without padding
        lines.append(f"{evaluated.name}: {len(samples)} samples {prefix}".rstrip())
    return lines
