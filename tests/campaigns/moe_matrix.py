"""Mixtures of experts in every layout, with every router, balancing loss and rule of capacity: against one process.

    python tests/campaigns/moe_matrix.py results.jsonl --limit-minutes 30       goes on where it stopped
    python tests/campaigns/moe_matrix.py results.jsonl --report docs/experts_matrix.md

Ranks are threads, in float64: losses, norms, gradients and weights of two steps, each tensor to 1e-10 of its largest value. The expert
of every token, and whether it was dropped, must be those of one process, and so must the bits of the experts' biases. With a capacity
at least a tenth of the choices must be dropped. Cases come in a fixed order: those in which every pair of choices with an axis of
experts occurs, then all other pairs, then all triples, of jobs up to 16 ranks. Exit code 1 if any case differs.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import expert_layouts
from case_runs import Matrix, command
from covering import covering
from expert_layouts import PIPELINES, PLAIN, RANKS, SEEDS, LayoutCase, Trained, outcome, worst_difference
from expert_models import GPT2, LLAMA, SUBJECT, unmasked
from tiny_run import VOCAB, Layout, Subject
from torch import Tensor

from megatron.core.transformer.model_config import ModelConfig

MODELS = {"gpt2": GPT2, "llama": LLAMA}
SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus", "moe_input_jitter_eps": 0.1},
}
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCES: dict[str, dict[str, Any]] = {
    "none": {},
    **{kind: {"moe_router_load_balancing_type": [kind], "moe_aux_loss_coeff": [0.3]} for kind in LOSSES},
    "z_loss": {"moe_z_loss_coeff": 0.01},
    "bias": {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 2e-4},
    "sinkhorn": {"moe_router_load_balancing_type": ["sinkhorn"]},
    "all": {
        "moe_router_load_balancing_type": list(LOSSES),
        "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
        "moe_z_loss_coeff": 0.01,
    },
}
CAPACITIES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "probs": {"moe_expert_capacity_factor": 0.75},
    "position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
}
DISPATCHES: dict[str, dict[str, Any]] = {
    "allgather": {},
    "alltoall": {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True},
    "beside shared": {
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": True,
    },
}
# Models that dispatch beside shared experts have dense layers too: number of layers -> which have experts.
DENSE_AMONG_EXPERTS = {2: "[0,1]", 4: "[0,1,1,0]"}
DIMENSIONS: dict[str, tuple] = expert_layouts.DIMENSIONS | {
    "scores": tuple(SCORES),
    "balance": tuple(BALANCES),
    "capacity": tuple(CAPACITIES),
    "dispatch": tuple(DISPATCHES),
}
NEW = ("ep", "etp")  # the pairs with one of these come first


@dataclass(frozen=True)
class MoECase(LayoutCase):
    """One choice of each dimension, in the order of DIMENSIONS."""

    scores: str
    balance: str
    capacity: str
    dispatch: str

    @property
    def can_be(self) -> bool:
        """A bias is added to scores of which each is of one expert. Sinkhorn's iteration has scores of its own, and no capacity."""
        has_softmax = "softmax" in self.scores
        if self.balance == "bias" and has_softmax:
            return False
        if self.balance == "sinkhorn" and not (has_softmax and self.capacity == "dropless"):
            return False
        return super().can_be

    def __str__(self) -> str:
        return "-".join([super().__str__(), self.scores, self.balance, self.capacity, self.dispatch]).replace(" ", "_")

    @property
    def layers(self) -> int:
        """As few as have every seam: two, or one in each stage; two in a stage where something is done between or with neighbours
        (recomputation of some, gathering ahead, dense layers among those of experts)."""
        if self.pipeline == "alone":
            return 2
        several = self.recompute in ("uniform 1", "block 1") or self.stage == 3 or self.dispatch == "beside shared"
        return 4 if several or "v" in PIPELINES[self.pipeline] else 2

    @property
    def router(self) -> tuple[str | int, ...]:
        """What decides the model, beside its recomputation."""
        return self.model, self.scores, self.balance, self.capacity, self.dispatch, self.layers

    @property
    def config(self) -> ModelConfig:
        return replace(config_of(*self.router), moe_layer_recompute=self.recompute == "experts")

    @property
    def microbatches(self) -> int:
        """Of one process. What balances a microbatch depends on which samples are in it."""
        return self.dp * 2 if self.balance in ("aux_loss", "all", "sinkhorn") else 2


def config_of(model: str, scores: str, balance: str, capacity: str, dispatch: str, layers: int) -> ModelConfig:
    options = SCORES[scores] | BALANCES[balance] | CAPACITIES[capacity] | DISPATCHES[dispatch]
    if dispatch == "beside shared":
        options["moe_layer_freq"] = DENSE_AMONG_EXPERTS[layers]
    return replace(MODELS[model], num_layers=layers, **options)


@cache
def covering_cases(strength: int, only: tuple[str, ...] = ()) -> tuple[MoECase, ...]:
    """Cases of at most RANKS ranks in which every `strength` choices occur together that can; those for NEW, and of the smaller
    strength, come first. only: of combinations with one of these dimensions."""
    if strength == 2 and not only:
        chosen = covering_cases(2, NEW)
    else:
        chosen = covering_cases(strength - 1) if strength > 2 else ()
    plain = asdict(PLAIN) | {"scores": "sigmoid", "balance": "none", "capacity": "dropless", "dispatch": "allgather"}
    seeds = [plain | seed | scores for scores in ({}, {"scores": "softmax"}) for seed in SEEDS]
    return covering(MoECase, DIMENSIONS, strength, seeds=seeds, chosen=chosen, only=only)


def without_repeated_beginning(number: int, texts: Any = None) -> dict[str, Tensor]:
    """A sample whose first two tokens differ: equal ones have equal probabilities, and rounding decides which an expert drops."""
    row = unmasked(number, texts)
    tokens = row["tokens"].clone()
    if tokens[0] == tokens[1]:
        tokens[0] = (tokens[0] + 1) % VOCAB
    return row | {"tokens": tokens}


def subject_of(capacity: str) -> Subject:
    return replace(SUBJECT, sample=without_repeated_beginning) if capacity == "probs" else SUBJECT


@cache
def one_process(router: tuple[str | int, ...], microbatches: int) -> Trained:
    config = config_of(*router)
    capacity = router[3]
    alone = outcome(config, Layout(m=microbatches), subject=subject_of(capacity))
    alone.ranks.clear()
    return alone


def difference(case: MoECase) -> tuple[float, str]:
    """The largest difference from one process, and where it is. AssertionError if a capacity drops less than a tenth, or if experts'
    biases have not moved."""
    got = outcome(case.config, case.layout, subject=subject_of(case.capacity))
    expected = one_process(case.router, case.microbatches)
    for trained in (got, expected):
        assert trained.dropped == 0 if case.capacity == "dropless" else trained.dropped >= 0.1, trained.dropped
        assert case.balance != "bias" or any(bias.any() for bias in trained.biases.values())
    return worst_difference(got, expected)


def main(arguments: Sequence[str] | None = None) -> int:
    cases = covering_cases(3)
    matrix = Matrix(
        script="moe_matrix",
        page="experts_matrix",
        title="Mixtures of experts: combinations of layouts, routers, losses and capacity that were run",
        text=(
            "This page counts the combinations of [experts](experts.md) with other features that were compared with one process.",
            "",
            "Each case trains a small GPT with eight experts for two steps in float64, with ranks as threads. Every loss, gradient norm, gradient",
            "and weight is compared with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor. The experts of every token,",
            "and which of them dropped it, must be the same, and so must the bits of the experts' biases. In a case with a capacity at least",
            "a tenth of the choices is dropped. The one process has microbatches of the same size where the loss of one depends on it",
            "(`aux_loss`) or its choice does (`sinkhorn`); they are of another size in all other cases with data parallelism.",
        ),
        dimensions=DIMENSIONS,
        cases=cases,
        total=len(cases),
        compare=difference,
        sets={
            "every pair of choices with the size of an axis of experts": covering_cases(2, NEW),
            "every pair": covering_cases(2),
            f"every triple, up to {RANKS} ranks": cases,
        },
    )
    return command(matrix, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
