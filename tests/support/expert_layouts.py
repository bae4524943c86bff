"""Models with experts in layouts, against one process: what their tests and their matrix share.

whole, biases, ranks = outcome(config, layout)                    losses, norms, gradients, weights; biases of experts; each rank's
differs(outcome(config, layout)[:2], one_process[:2])             (0.0, "") if nothing
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from covering import Combined
from expert_models import BATCH, SUBJECT, zero
from local_ranks import run_ranks
from parity_cases import worst_of
from tiny_run import (
    Layout,
    Outcome,
    Subject,
    TinyTrainer,
    gradient_of,
    pieces_of_chunks,
    put_together,
    weights_at_the_end,
)
from torch import Tensor

from megatron.core.ops.shard_sequence import positions_of
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.router import ParallelRouter

Choices = dict[tuple[int, int, int], list[tuple[int, bool]]]
"""(layer, sample, position) -> the experts of the token, and whether each keeps it."""


def note_choices(tiny: TinyTrainer) -> Choices:
    """What the routers of this rank choose from now on. Samples are numbered over the whole run."""
    found: Choices = {}

    def note(router: ParallelRouter, inputs: tuple, routing: Any) -> None:
        positions = positions_of(inputs[1], routing.ids.shape[0], routing.ids.device).tolist()
        ids = routing.ids.tolist()
        kept = (torch.ones_like(routing.ids, dtype=torch.bool) if routing.kept is None else routing.kept).tolist()
        for i, position in enumerate(positions):
            for row, sample in enumerate(router.context.keys.samples):
                found[router.layer_number, sample, position] = list(zip(ids[i][row], kept[i][row], strict=True))

    for module in (module for chunk in tiny.model for module in chunk.module.modules()):
        if isinstance(module, ParallelRouter):
            module.register_forward_hook(note)
    return found


class Found(dict):
    """What one rank knows: of `Outcome`, with the biases of its layers, and its calls of the last step."""


def train(mesh: Mesh, config: ModelConfig, layout: Layout, steps: int, subject: Subject) -> Found:
    optimizer = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, optimizer=optimizer, subject=subject)
    found = Found(losses=[], norms=[], grads=[], choices=note_choices(tiny))
    for number in range(steps):
        with mesh.ledger.record() as calls:
            result = tiny.step(number)
        found["losses"].append(sum(result.losses.values()))
        found["norms"].append(result.grad_norm)
        found["grads"].append(pieces_of_chunks(tiny.chunks, mesh, gradient_of, {"sums": tiny.buffers}))
    found["weights"] = weights_at_the_end(tiny, mesh)
    named = [pair for chunk in tiny.model for pair in chunk.module.named_buffers()]
    found["biases"] = {name: value for name, value in named if name.endswith("expert_bias")}
    assert all(not value.any() for name, value in named if name.endswith("tokens_per_expert"))
    found["calls"] = Counter((call.op, call.axis) for call in calls)
    found["is_last"] = mesh.has_last_stage
    return found


@dataclass
class Trained:
    """What must not depend on the layout; and what each rank knows, which does."""

    whole: Outcome
    biases: dict[str, Tensor] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)  # of `ParallelRouter`
    ranks: list[Found] = field(default_factory=list)

    @property
    def dropped(self) -> float:
        """The share of chosen experts that did not take the token."""
        kept = [is_kept for pairs in self.choices.values() for _, is_kept in pairs]
        return 1 - sum(kept) / len(kept)


def outcome(config: ModelConfig, layout: Layout, steps: int = 2, subject: Subject = SUBJECT) -> Trained:
    ranks = run_ranks(
        layout.sizes,
        partial(train, config=layout.applied_to(config), layout=layout, steps=steps, subject=subject),
        delayed=layout.delayed,
        ranks_per_kv_head=config.ranks_per_kv_head(layout.tp),
        stages=layout.stages if layout.pp > 1 else None,
    )
    biases: dict[str, Tensor] = {}
    choices: Choices = {}
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for name, value in rank["biases"].items():
            assert torch.equal(biases.setdefault(name, value), value), f"{name} differs between ranks"
        for token, chosen in rank["choices"].items():
            assert choices.setdefault(token, chosen) == chosen, f"ranks choose differently for {token}"
    whole = Outcome(
        losses=[rank for rank in ranks if rank["is_last"]][-1]["losses"],
        norms=ranks[0]["norms"],
        grads=[put_together([rank["grads"][step] for rank in ranks]) for step in range(steps)],
        weights=put_together([rank["weights"] for rank in ranks]),
    )
    return Trained(whole, biases, choices, ranks)


def worst_difference(got: Trained, expected: Trained) -> tuple[float, str]:
    """The largest relative difference, and where it is; infinite if a token went elsewhere or was dropped by one of them, or if the
    bits of a bias differ."""
    assert got.biases.keys() == expected.biases.keys()
    if got.choices != expected.choices:
        layer, sample, position = next(t for t, pairs in expected.choices.items() if got.choices.get(t) != pairs)
        return math.inf, f"choices of layer {layer} for token {position} of sample {sample}"
    worst = next((name for name, bias in expected.biases.items() if not torch.equal(got.biases[name], bias)), None)
    return worst_of(got.whole, expected.whole) if worst is None else (math.inf, worst)


# ---------------------------------------------------------------- layouts

LAYOUTS = (  # by hand
    Layout(dp=2, tp=2, pp=2, ep=2, m=2, data_parallel=zero(3)),
    Layout(dp=4, ep=4, m=1, data_parallel=zero(1), delayed=True),
    Layout(tp=2, sp=True, ep=2, etp=1, m=2, recompute="uniform 1"),
    Layout(tp=2, m=2),
    Layout(cp=2, dp=2, ep=4, m=2, data_parallel=zero(2)),
    Layout(pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(3, overlap_param_gather=True)),
    Layout(pp=2, v=2, tp=2, sp=True, dp=2, ep=2, m=2, schedule="interleaved", data_parallel=zero(1)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(3), recompute="all parts", delayed=True),
    Layout(tp=2, dp=2, ep=4, etp=1, m=2, data_parallel=zero(2), schedule="1f1b"),
    Layout(dp=2, etp=2, m=2, data_parallel=zero(0)),
    Layout(cp=2, tp=2, sp=True, ep=2, m=2, recompute="uniform 2", data_parallel=zero(0)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(1, num_distributed_optimizer_instances=2)),
    Layout(pp=2, v=2, dp=2, ep=2, m=2, schedule="zb-v", data_parallel=zero(2), recompute="selective"),
    Layout(tp=2, pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(2), delayed=True),
)
PIPELINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "v": 2, "schedule": "interleaved"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-interleaved": {"pp": 2, "v": 2, "schedule": "zb-interleaved"},
    "zb-v": {"pp": 2, "v": 2, "schedule": "zb-v"},
}
DIMENSIONS: dict[str, tuple] = {
    "tp": (1, 2),
    "sp": (False, True),
    "pipeline": tuple(PIPELINES),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (None, 1, 2),
    "stage": (0, 1, 2, 3),
    "ahead": (False, True),
    "groups": (1, 2),
    "recompute": ("none", "uniform 1", "block 1", "selective", "all parts", "experts"),
    "delayed": (False, True),
    "model": ("gpt2", "llama"),
}
RANKS = 16


@dataclass(frozen=True)
class LayoutCase(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    tp: int
    sp: bool
    pipeline: str
    cp: int
    dp: int
    ep: int
    etp: int | None
    stage: int
    ahead: bool  # parameters are gathered before they are needed
    groups: int  # of ranks that have all shards
    recompute: str  # experts: the layers of experts alone
    delayed: bool
    model: str

    @property
    def layout(self) -> Layout:
        config = zero(self.stage, num_distributed_optimizer_instances=self.groups, overlap_param_gather=self.ahead)
        same = {name: getattr(self, name) for name in ("tp", "sp", "cp", "dp", "ep", "etp", "delayed")}
        recompute = "none" if self.recompute == "experts" else self.recompute
        return Layout(**same, **PIPELINES[self.pipeline], m=2, recompute=recompute, data_parallel=config)

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * PIPELINES[self.pipeline].get("pp", 1)

    @property
    def can_be(self) -> bool:
        """Whether the ranks can be dealt so, and no rule refuses it: ZeRO 3 has no table that two chunks of a rank share."""
        of_experts = self.ep * (self.etp or self.tp) * self.groups
        return (
            self.ranks <= RANKS
            and self.tp * self.cp * self.dp % of_experts == 0
            and not (self.sp and self.tp == 1)
            and not (self.groups > 1 and (self.stage == 0 or self.dp == 1))
            and not (self.ahead and self.stage == 0)
            and not (self.pipeline == "zb-v" and self.model == "gpt2" and self.stage == 3)
        )

    def __str__(self) -> str:
        parts = [f"tp{self.tp}{'sp' if self.sp else ''}", self.pipeline, f"cp{self.cp}-dp{self.dp}-ep{self.ep}"]
        parts += [f"etp{self.etp}"] * (self.etp is not None) + [f"zero{self.stage}"] + ["ahead"] * self.ahead
        parts += ["groups"] * (self.groups > 1) + [self.recompute] * (self.recompute != "none")
        return "-".join([*parts, *["delayed"] * self.delayed, self.model]).replace(" ", "")


PLAIN = LayoutCase(1, False, "alone", 1, 1, 1, None, 1, False, 1, "none", False, "llama")
"""What almost any choice can be made in."""
SEEDS: tuple[dict[str, Any], ...] = (
    *({"tp": tp, "sp": tp > 1, "dp": dp, "cp": cp} for tp in (1, 2) for dp in (1, 2, 4) for cp in (1, 2)),
    {"tp": 2, "sp": True, "cp": 2, "etp": 1},
)
"""Changes of PLAIN in which ranks for everything are found."""
