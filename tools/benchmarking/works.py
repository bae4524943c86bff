"""The works of README's table, by name. Pure.

    gpt2-4x512-bf16-dropout      model, samples x tokens, precision, and dropout of 0.1 where Megatron's default has it

A prefix names several: `--works gpt2`, `--works llama-4x512-fp32`; `readme` are all of the table, `parallel` those on two ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tools.benchmarking.work import MODELS, Work

_SIZES = {
    "gpt-28m-2x512": ("gpt-28m", 2, 512),
    "gpt2-4x512": ("gpt2-small", 4, 512),
    "gpt2-2x1024": ("gpt2-small", 2, 1024),
    "llama-4x512": ("llama-small", 4, 512),
    "bert-4x512": ("bert-small", 4, 512),
}
_ON_TWO_RANKS = {"dp": 2, "zero3": 2, "tp": 1, "pp": 4}  # samples of a step, by kind: each rank has half the work


def _of(model: str, samples: int, tokens: int) -> Work:
    sizes = {"micro_batch_size": samples, "global_batch_size": samples, "seq_length": tokens}
    return Work(**{**MODELS[model], **sizes})


def _for_readme() -> Iterator[tuple[str, Work]]:
    for name, sizes in _SIZES.items():
        for precision in ("fp32", "bf16"):
            for suffix, dropout in (("", 0.0), ("-dropout", 0.1)):
                changed = {"bf16": precision == "bf16", "attention_dropout": dropout, "hidden_dropout": dropout}
                yield f"{name}-{precision}{suffix}", replace(_of(*sizes), **changed)


def _for_parallel() -> Iterator[tuple[str, Work]]:
    for kind, samples in _ON_TWO_RANKS.items():
        work = replace(_of("gpt-28m", 1, 512), parallel=kind, ranks=2, global_batch_size=samples)
        yield f"parallel-{kind}", replace(work, micro_batch_size=1)


README, ON_TWO_RANKS = dict(_for_readme()), dict(_for_parallel())
GROUPS = {"readme": README, "parallel": ON_TWO_RANKS}


def chosen(names: Sequence[str], *, half: bool = True) -> dict[str, Work]:
    """The works of these names, prefixes or groups, in the order given; of one name in the table's. half: also in bfloat16."""
    every = README | ON_TWO_RANKS
    found = {
        name: work
        for given in names
        for name, work in every.items()
        if name in GROUPS.get(given, ()) or name.startswith(given)
    }
    return {name: work for name, work in found.items() if half or not work.bf16}


def unknown(names: Sequence[str]) -> list[str]:
    """Names that are no work, prefix or group."""
    return [name for name in names if name not in GROUPS and not chosen([name])]
