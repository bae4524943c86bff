"""Works of README's table, by name. Pure.

    gpt2-4x512-bf16-dropout      model, samples x tokens, precision, and dropout of 0.1 where Megatron's default has it

A prefix names several: `--works gpt2`, `--works llama-4x512-fp32`; `readme` is all of the table, `parallel` the
works on two ranks.
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
_ON_TWO_RANKS = {"dp": 2, "zero3": 2, "tp": 1, "pp": 4}  # parallelism -> samples of a step


def _make_work(model: str, samples: int, tokens: int) -> Work:
    sizes = {"micro_batch_size": samples, "global_batch_size": samples, "seq_length": tokens}
    return Work(**{**MODELS[model], **sizes})


def _for_readme() -> Iterator[tuple[str, Work]]:
    for name, (model, samples, tokens) in _SIZES.items():
        work = _make_work(model, samples, tokens)
        for precision in ("fp32", "bf16"):
            for suffix, dropout in (("", 0.0), ("-dropout", 0.1)):
                is_bf16 = precision == "bf16"
                variant = replace(work, bf16=is_bf16, attention_dropout=dropout, hidden_dropout=dropout)
                yield f"{name}-{precision}{suffix}", variant


def _for_parallel() -> Iterator[tuple[str, Work]]:
    for kind, samples in _ON_TWO_RANKS.items():
        work = _make_work("gpt-28m", 1, 512)
        yield f"parallel-{kind}", replace(work, parallel=kind, ranks=2, global_batch_size=samples)


README = dict(_for_readme())
ON_TWO_RANKS = dict(_for_parallel())
GROUPS = {"readme": README, "parallel": ON_TWO_RANKS}


def chosen(names: Sequence[str], *, half: bool = True) -> dict[str, Work]:
    """Return the works of these names, prefixes or groups, in this order.

    Within a prefix or group they are in the table's order.

    half: include works in bfloat16.
    """
    all_works = README | ON_TWO_RANKS
    result = {}
    for requested in names:
        for name, work in all_works.items():
            is_requested = name in GROUPS.get(requested, ()) or name.startswith(requested)
            if is_requested and (half or not work.bf16):
                result[name] = work
    return result


def unknown(names: Sequence[str]) -> list[str]:
    """Return the names that are no work, prefix or group."""
    return [name for name in names if name not in GROUPS and not chosen([name])]
