"""Every ZeRO stage with every way to overlap, accumulate, recompute and offload, in six layouts: against one process.

    python tests/campaigns/zero_matrix.py results.jsonl --limit-minutes 30         the product; goes on where it stopped
    python tests/campaigns/zero_matrix.py results.jsonl --report docs/zero_matrix.md

Cases come in a fixed order: those in which every triple of choices occurs, then the rest, shuffled. Ranks are threads, in float64: losses, norms, gradients and weights of three steps, each tensor to 1e-10 of its largest value. Exit
code 1 if any case differs.
"""

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import Matrix, command
from covering import Combined, cover
from parity_cases import worst_of
from tiny_run import TINY_GPT2, Layout, Outcome, run

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.cpu_offloading.sliced_update import SlicedUpdater
from megatron.core.transformer.model_config import ModelConfig

BUCKET = 1500  # elements: several buckets on every rank
_HYBRID = {"zero_stage": 3, "num_distributed_optimizer_instances": 2}
STAGES = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "hsdp": _HYBRID,
    "hfsdp": _HYBRID | {"outer_dp_sharding_strategy": "optim"},
}
DIMENSIONS = {
    "stage": tuple(STAGES),
    "overlap": (False, True),
    "accumulation": (1, 3),  # microbatches; with virtual stages so many rounds of one for each pipeline rank
    "recompute": ("none", "selective", "full"),
    "offload": (
        "none",
        "host",
        "file",
    ),  # of masters and moments, and of parameters where a rank keeps a shard of them only
    "tied": (False, True),
    "layout": (  # tp, pp, virtual stages, cp
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 1, 1),
        (1, 1, 1, 2),
    ),
}


@dataclass(frozen=True)
class ZeroCase(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    stage: str
    overlap: bool
    accumulation: int
    recompute: str
    offload: str
    tied: bool
    layout: tuple[int, int, int, int]

    def __str__(self) -> str:
        tp, pp, v, cp = self.layout
        parts = [f"zero{self.stage}" if self.stage.isdigit() else self.stage, f"tp{tp}-pp{pp}", f"a{self.accumulation}"]
        parts += [f"v{v}"] * (v > 1) + [f"cp{cp}"] * (cp > 1) + [self.recompute] * (self.recompute != "none")
        parts += [self.offload] * (self.offload != "none")
        return "-".join([*parts, "tied" if self.tied else "untied", *["overlap"] * self.overlap])

    @property
    def model(self) -> ModelConfig:
        return replace(TINY_GPT2, untie_embeddings_and_output_weights=not self.tied)

    @property
    def run_layout(self) -> Layout:
        tp, pp, v, cp = self.layout
        settings = dict(STAGES[self.stage])
        if self.overlap:
            settings |= dict(overlap_grad_reduce=True, ddp_bucket_size=BUCKET, overlap_param_gather=self.stage != "0")
        return Layout(
            tp=tp,
            pp=pp,
            v=v,
            cp=cp,
            dp=4 if "num_distributed_optimizer_instances" in settings else 2,
            m=self.accumulation * (pp if v > 1 else 1),
            schedule="interleaved" if v > 1 else "1f1b",
            recompute="uniform 1" if self.recompute == "full" else self.recompute,
            data_parallel=DataParallelConfig(**settings),
        )

    def offload_to(self, folder: str) -> OffloadConfig:
        return OffloadConfig(
            optimizer_cpu_offload=self.offload == "host",
            offload_dir=folder if self.offload == "file" else None,
            offload_params=self.offload != "none" and STAGES[self.stage]["zero_stage"] == 3,
        )


def all_cases() -> tuple[ZeroCase, ...]:
    return tuple(ZeroCase(*choices) for choices in product(*DIMENSIONS.values()))


@cache
def covering_cases(strength: int) -> tuple[ZeroCase, ...]:
    """Some cases in which every `strength` choices of different dimensions occur together, those of the smaller strength first."""
    chosen = covering_cases(strength - 1) if strength > 2 else ()
    return cover(
        all_cases(), lambda case: frozenset(combinations(zip(DIMENSIONS, case.choices), strength)), chosen=chosen
    )


def ordered_cases() -> Iterator[ZeroCase]:
    """All cases, those that cover most first, the rest shuffled, so that what has run is a fair sample."""
    rest = list(all_cases())
    Random(0).shuffle(rest)
    yield from dict.fromkeys((*covering_cases(3), *rest))


@cache
def one_process(model: ModelConfig, steps: int) -> Outcome:
    return run(model, Layout(), steps=steps)


def outcomes(case: ZeroCase, steps: int = 3) -> tuple[Outcome, Outcome]:
    """What the case computes, and what one process does."""
    with tempfile.TemporaryDirectory() as folder, several_slices():
        got = run(case.model, replace(case.run_layout, offload=case.offload_to(folder)), steps=steps)
        assert not list(Path(folder).iterdir()), "files are left"
    return got, one_process(case.model, steps)


@contextlib.contextmanager
def several_slices() -> Iterator[None]:
    """What is offloaded is updated in pieces that a tiny model has several of."""
    usual = SlicedUpdater.__init__.__defaults__
    SlicedUpdater.__init__.__defaults__ = (480,)
    try:
        yield
    finally:
        SlicedUpdater.__init__.__defaults__ = usual


def worst_difference(case: ZeroCase) -> tuple[float, str]:
    return worst_of(*outcomes(case))


def main(arguments: list[str] | None = None) -> int:
    total, covering = math.prod(map(len, DIMENSIONS.values())), {n: covering_cases(n) for n in (2, 3)}
    matrix = Matrix(
        script="zero_matrix",
        title="ZeRO: combinations of stages, overlap, accumulation, recompute, offload and layouts that were run",
        text=(
            "This page counts the combinations of ZeRO with other features that were compared with one process.",
            "",
            "Each case trains a small GPT for three steps in float64, with ranks as threads. Every loss, gradient norm, gradient and weight is",
            "compared with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor. The tests, with `-m sweep`, run the cases",
            "that cover every triple of choices.",
        ),
        dimensions=DIMENSIONS,
        cases=list(ordered_cases()),
        total=total,
        compare=worst_difference,
        sets={"every pair of choices": covering[2], "every triple of choices": covering[3]},
    )
    return command(matrix, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
