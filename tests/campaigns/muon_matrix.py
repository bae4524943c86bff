"""Muon in every layout, at ZeRO 0 and 1, with every kind of fused matrix: against one process.

    python tests/campaigns/muon_matrix.py results.jsonl --limit-minutes 10         the product; goes on where it stopped
    python tests/campaigns/muon_matrix.py results.jsonl --report docs/muon_matrix.md

Ranks are threads, in float64: losses, norms, gradients and weights of three steps, each tensor to 1e-10 of its largest value. Exit
code 1 if any case differs.
"""

import sys
from collections.abc import Sequence
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
from tiny_run import TINY_GPT2, TINY_LLAMA, Layout, Outcome, run

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig

LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp4sp": {"tp": 4, "sp": True},
    "pp2": {"pp": 2, "schedule": "zb-h1"},
    "tp2sp-pp2-v2": {"tp": 2, "sp": True, "pp": 2, "v": 2, "schedule": "interleaved"},
    "tp4-pp2": {"tp": 4, "pp": 2, "schedule": "gpipe", "recompute": "uniform 1"},
}
_OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 1500}
SHARDS = {
    "one": {},
    "0": {"zero_stage": 0},
    "0 overlapped": _OVERLAP,
    "1": {"zero_stage": 1},
    "1 overlapped": {"zero_stage": 1, "overlap_param_gather": True} | _OVERLAP,
    "1 hybrid": {"zero_stage": 1, "num_distributed_optimizer_instances": 2},
    "0 in order": {"fixed_order_grad_reduce": True},
}
MODELS = {
    "gpt2": TINY_GPT2,
    "untied": replace(TINY_GPT2, untie_embeddings_and_output_weights=True),
    "llama": TINY_LLAMA,
    "one group": replace(TINY_LLAMA, num_query_groups=1),  # ranks share its key and value head
}
MUON = {
    "default": {},
    "nesterov": {"muon_nesterov": True, "muon_coefficient_type": "simple", "muon_num_ns_steps": 7},
    "fused": {"muon_split_qkv": False, "muon_scale_mode": "shape_scaling", "muon_momentum": 0.0},
    "sgd": {
        "muon_scalar_optimizer": "sgd",
        "muon_scale_mode": "unit_rms_norm",
        "muon_coefficient_type": "polar_express",
    },
}
DIMENSIONS = {"layout": tuple(LAYOUTS), "shards": tuple(SHARDS), "model": tuple(MODELS), "muon": tuple(MUON)}


@dataclass(frozen=True)
class MuonCase(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    layout: str
    shards: str
    model: str
    muon: str

    def __str__(self) -> str:
        return "-".join(self.choices).replace(" ", "_")

    @property
    def run_layout(self) -> Layout:
        dp = 1 if self.shards == "one" else 4 if "hybrid" in self.shards else 2
        parallel = DataParallelConfig(**SHARDS[self.shards])
        return Layout(dp=dp, m=2, delayed="overlapped" in self.shards, data_parallel=parallel, **LAYOUTS[self.layout])

    @property
    def optimizer(self) -> OptimizerConfig:
        shared = {"optimizer": "muon", "clip_grad": 0.5, "weight_decay": 0.1, "muon_extra_scale_factor": 0.2}
        return OptimizerConfig(**shared | MUON[self.muon])


def all_cases() -> tuple[MuonCase, ...]:
    return tuple(MuonCase(*choices) for choices in product(*DIMENSIONS.values()))


@cache
def covering_cases() -> tuple[MuonCase, ...]:
    """Some cases in which every two choices of different dimensions occur together."""
    return cover(all_cases(), lambda case: frozenset(combinations(zip(DIMENSIONS, case.choices), 2)))


@cache
def _one_process(model: str, muon: str) -> Outcome:
    return run(MODELS[model], Layout(), optimizer=MuonCase("tp1", "one", model, muon).optimizer)


def outcomes(case: MuonCase) -> tuple[Outcome, Outcome]:
    """What the case computes, and what one process does."""
    got = run(MODELS[case.model], case.run_layout, optimizer=case.optimizer)
    return got, _one_process(case.model, case.muon)


def ordered_cases() -> list[MuonCase]:
    """All cases, the covering ones first, the rest shuffled, so that what has run is a fair sample."""
    rest = list(all_cases())
    Random(0).shuffle(rest)
    return list(dict.fromkeys((*covering_cases(), *rest)))


def main(arguments: Sequence[str] | None = None) -> int:
    matrix = Matrix(
        script="muon_matrix",
        title="Muon: the layouts that were run",
        text=(
            "This page counts the layouts of [Muon](muon.md) that were compared with one process.",
            "",
            "Each case trains a small GPT for three steps with `--optimizer muon` in float64, with ranks as threads. Every loss, gradient norm,",
            "gradient and weight is compared with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor.",
        ),
        dimensions=DIMENSIONS,
        cases=ordered_cases(),
        total=len(all_cases()),
        compare=lambda case: worst_of(*outcomes(case)),
        sets={"every pair of choices": covering_cases()},
    )
    return command(matrix, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
