"""The sets that a validation or test evaluates, each with its name in the log, and how one is read to its end. No torch.

A set that is read whole ends with rows that count nothing, so that every rank has whole microbatches:

    9 samples, microbatches of 2, 2 data-parallel ranks     0 1 | 2 3 | 4 5 | 6 7 | 8 - | - -
                                                            rank0 rank1 rank0 rank1 rank0 rank1

The samples of a microbatch are the same on any number of ranks, so the loss is too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_loader import Samples


@dataclass(eq=False)
class FilledUp:
    """`samples`, then rows that count nothing, up to a multiple of `block`: sample 0 again, with a `loss_mask` of zeros."""

    samples: Samples
    block: int

    def __len__(self) -> int:
        return -(-len(self.samples) // self.block) * self.block

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i < len(self.samples):
            return self.samples[i]
        item = dict(self.samples[0])
        return item | {"loss_mask": item["loss_mask"] * 0}

    @property
    def has_empty_rows(self) -> bool:
        return len(self) > len(self.samples)


@dataclass(frozen=True)
class EvaluatedSet:
    """One set. name: `validation`, `validation-wiki` for one of several, or `test`. is_whole: read to its end each time."""

    split: str
    name: str
    samples: Any
    is_whole: bool = False


def sets_of(split: str, dataset: Any, data: DataConfig, samples_at_once: int) -> list[EvaluatedSet]:
    """The sets of `split`, which are evaluated one after another; `dataset` is what the script's provider gave for it.

    samples_at_once: of one microbatch over all data-parallel ranks. Raises ConfigError for a set that cannot be read whole.
    """
    is_valid = split == "valid"
    given = _several(dataset, data) if is_valid and data.multiple_validation_sets else {"": dataset}
    found = []
    for suffix, samples in given.items():
        name = f"{'validation' if is_valid else split}{suffix}"
        if samples is None:
            continue
        if is_valid and data.full_validation:
            found.append(EvaluatedSet(split, name, _whole(samples, name, samples_at_once), is_whole=True))
        else:
            found.append(EvaluatedSet(split, name, samples))
    return found


def _several(dataset: Any, data: DataConfig) -> dict[str, Any]:
    """The sets of --multiple-validation-sets by the end of their names, as Megatron has them: -0, -1, or -NAME."""
    sets = dataset if isinstance(dataset, list) else [dataset]
    names = data.validation_set_names or [str(number) for number in range(len(sets))]
    if len(names) != len(sets):
        raise ConfigError(
            f"--validation-set-names gives {len(names)} names ({' '.join(names)}), and the script's provider {len(sets)} "
            "validation sets; give one for each"
        )
    return {f"-{name}": one for name, one in zip(names, sets)}


def _whole(samples: Samples, name: str, samples_at_once: int) -> FilledUp:
    if not len(samples):
        raise ConfigError(f"the {name} set has no samples, so --full-validation has nothing to read; use more data")
    whole = FilledUp(samples, samples_at_once)
    if whole.has_empty_rows and "loss_mask" not in samples[0]:
        raise ConfigError(
            f"--full-validation: the {name} set has {len(samples)} samples, no multiple of {samples_at_once} (--micro-batch-size "
            "x data-parallel size), and its samples have no loss_mask by which a row can count nothing; leave it out"
        )
    return whole


def too_small(of: EvaluatedSet, batch_size: int) -> str | None:
    """Why a set is left out; None if it is not."""
    if of.is_whole or len(of.samples) >= batch_size:
        return None
    split = "valid" if of.name == "validation" else of.name
    return f"{split} set of {len(of.samples)} samples is left out: a global batch has {batch_size}"


def lines_of(sets: Mapping[str, Sequence[EvaluatedSet]], data: DataConfig, batch_size: int) -> list[str]:
    """Lines for the start of a run: the sets that are left out, and each of several with its file, where that is known."""
    reasons = [too_small(of, batch_size) for found in sets.values() for of in found]
    return [reason for reason in reasons if reason] + (_several_lines(sets["valid"], data) if sets["valid"] else [])


def _several_lines(sets: Sequence[EvaluatedSet], data: DataConfig) -> list[str]:
    if not data.multiple_validation_sets:
        return []
    blend = data.blends()[1]
    prefixes = [] if blend is None else list(blend.prefixes)
    told = prefixes if len(prefixes) == len(sets) else [""] * len(sets)
    counts = [len(of.samples.samples) if of.is_whole else len(of.samples) for of in sets]
    return [f"{of.name}: {count} samples {prefix}".rstrip() for of, count, prefix in zip(sets, counts, told)]
