"""Context parallelism in every way, with every other axis and with what attention may be: against one process.

    python tests/campaigns/context_matrix.py results.jsonl --limit-minutes 30       goes on where it stopped
    python tests/campaigns/context_matrix.py results.jsonl --report docs/context_matrix.md

Ranks are threads, in float64: losses, norms, gradients and weights of two steps, each tensor to 1e-10 of its largest value. In each
case the ledger must show the calls that the type's formula says and no other over the axis, and the kernels that ran must be the
type's own. Cases come in a fixed order: those in which every pair of choices with the axis or the type occurs (the tests run
them), then all other pairs, then all triples, of jobs up to 16 ranks. Exit code 1 if any case differs.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import Matrix, command
from covering import Combined, covering
from parity_cases import BUCKET, worst_of
from tiny_run import GPT2, LLAMA, SEQ, Layout, Outcome, Texts, run

from megatron.core.context_parallel import block_attention
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.transformer.model_config import ModelConfig

PIPELINES = {  # ranks, chunks of each, schedule
    "1 stage": (1, 1, "1f1b"),
    "1f1b": (2, 1, "1f1b"),
    "zb-h1": (2, 1, "zb-h1"),
    "interleaved": (2, 2, "interleaved"),
    "zb-v": (2, 2, "zb-v"),
    "gpipe": (2, 1, "gpipe"),
    "zb-interleaved": (2, 2, "zb-interleaved"),
}
BESIDE: dict[str, dict] = {  # of the model
    "nothing": {},
    "fixed order": {},
    "muon": {},
    "offload": {},  # of masters and moments, and of the inputs of a layer
    "options": {
        **{
            "qk_layernorm": True,
            "rotary_interleaved": True,
            "embedding_multiplier": 4.0,
            "final_logit_softcapping": 1.5,
        },
        **{"rotary_percent": 0.5, "no_rope_freq": "3", "norm_placement": "sandwich"},
    },
}
GROUPS = {"8 groups": 8, "2 groups": 2, "1 group": 1}  # of 8 heads
TEXTS = {"one text": Texts(), "documents": Texts(documents=True, as_mask=False), "mask": Texts(documents=True)}
DIMENSIONS: dict[str, tuple] = {
    "cp": (2, 4),
    "kind": ("p2p", "all_gather", "a2a", "a2a+p2p", "mixed"),  # mixed: another type in each layer
    "tp": ("1", "2", "2sp"),
    "pipeline": tuple(PIPELINES),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "groups": tuple(GROUPS),
    "windows": (False, True),
    "texts": tuple(TEXTS),
    "scores": ("plain", "capped, sinks"),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "selective", "uniform 2", "block 1"),
    "positions": ("learned", "rope"),
    "tiled": (False, True),  # MLP and loss
    "beside": tuple(BESIDE),
    "delayed": (False, True),
}
NEW = ("cp", "kind")  # the pairs with one of these are the tests'
RANKS = 16
BATCH = 4
BYTES = 8  # of an element


@dataclass(frozen=True)
class ContextCase(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    cp: int
    kind: str
    tp: str
    pipeline: str
    dp: int
    zero: int
    groups: str
    windows: bool
    texts: str
    scores: str
    dropout: float
    recompute: str
    positions: str
    tiled: bool
    beside: str
    delayed: bool

    @property
    def ranks(self) -> int:
        return self.cp * int(self.tp[0]) * PIPELINES[self.pipeline][0] * self.dp

    @property
    def can_be(self) -> bool:
        """Whether it fits, and no rule refuses it: ZeRO 3 and sums in a fixed order have no table that two chunks of a rank
        share, and Muon and these sums no gradients in shards."""
        needs_one_table = self.zero == 3 or self.beside == "fixed order"
        refused = (
            self.pipeline == "zb-v" and self.positions == "learned" and needs_one_table,
            self.zero > 1 and self.beside in ("muon", "fixed order"),
            self.beside == "options" and self.positions == "learned",
            self.beside == "offload" and (self.zero == 0 or self.recompute != "none"),
        )
        return self.ranks <= RANKS and not any(refused)

    def __str__(self) -> str:
        parts = [f"cp{self.cp}-{self.kind}-tp{self.tp}-{self.pipeline}-dp{self.dp}-zero{self.zero}", self.groups]
        parts += ["windows"] * self.windows + [self.texts] * (self.texts != "one text")
        parts += (
            ["capped"] * (self.scores != "plain")
            + ["dropout"] * (self.dropout > 0)
            + [self.recompute] * (self.recompute != "none")
        )
        parts += [self.positions, *["tiled"] * self.tiled, *[self.beside] * (self.beside != "nothing")]
        return "-".join([*parts, *["delayed"] * self.delayed]).replace(" ", "")

    @property
    def model(self) -> ModelConfig:
        pp, v, _ = PIPELINES[self.pipeline]
        return replace(
            GPT2 if self.positions == "learned" else LLAMA,
            num_layers=max(2, pp * v),
            group_query_attention=True,
            num_query_groups=GROUPS[self.groups],
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            tiled_mlp=2 if self.tiled else 1,
            tiled_loss=2 if self.tiled else 1,
            window_size="3,0" if self.windows else None,
            **({} if self.scores == "plain" else {"attn_logit_softcapping": 0.7, "softmax_type": "learnable"}),
            **BESIDE[self.beside],
            **({"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 0} if self.beside == "offload" else {}),
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        shared = {"clip_grad": 0.5, "weight_decay": 0.1}
        return OptimizerConfig(optimizer="muon", **shared) if self.beside == "muon" else OptimizerConfig(**shared)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of each layer."""
        each = ("p2p", "all_gather", "a2a", "a2a+p2p") if self.kind == "mixed" else (self.kind,)
        return tuple(each[layer % len(each)] for layer in range(self.model.num_layers))

    @property
    def layout(self) -> Layout:
        pp, v, schedule = PIPELINES[self.pipeline]
        return Layout(
            tp=int(self.tp[0]),
            sp=self.tp.endswith("sp"),
            pp=pp,
            dp=self.dp,
            cp=self.cp,
            cp_heads=2,
            cp_types=self.kinds if self.kind == "mixed" else (self.kind,),
            m=pp,
            v=v,
            schedule=schedule,
            recompute=self.recompute,
            data_parallel=DataParallelConfig(
                zero_stage=self.zero,
                overlap_grad_reduce=self.zero > 1,
                ddp_bucket_size=BUCKET if self.zero > 1 else None,
                fixed_order_grad_reduce=self.beside == "fixed order",
            ),
            offload=OffloadConfig(optimizer_cpu_offload=self.beside == "offload"),
            delayed=self.delayed,
        )


# ---------------------------------------------------------------- covering sets

_FIRST = {name: choices[0] for name, choices in DIMENSIONS.items()}
_SEEDS = (
    _FIRST,
    _FIRST | {"positions": "rope"},
    _FIRST | {"positions": "rope", "zero": 1},
)  # of completions that may be


@cache
def covering_cases(strength: int, only: tuple[str, ...] = ()) -> tuple[ContextCase, ...]:
    """Cases of at most RANKS ranks in which every `strength` choices occur together that can; those for NEW, and of the smaller
    strength, come first. only: of combinations with one of these dimensions."""
    if strength == 2 and not only:
        chosen = covering_cases(2, NEW)
    else:
        chosen = covering_cases(strength - 1) if strength > 2 else ()
    return covering(ContextCase, DIMENSIONS, strength, seeds=_SEEDS, chosen=chosen, only=only)


# ---------------------------------------------------------------- one case


@cache
def one_process(model: ModelConfig, texts: Texts, steps: int, optimizer: OptimizerConfig) -> Outcome:
    return run(model, Layout(), global_batch=BATCH, steps=steps, texts=texts, optimizer=optimizer)


def outcomes(case: ContextCase, steps: int = 2) -> tuple[Outcome, Outcome]:
    """What the case computes, and what one process does. AssertionError if calls or kernels are not those of its types."""
    with kernels_that_run() as computed:
        options = {"steps": steps, "texts": TEXTS[case.texts], "optimizer": case.optimizer}
        got = run(case.model, case.layout, global_batch=BATCH, **options)
    assert computed.keys() == expected_kernels(case), f"kernels that ran: {dict(computed)}"
    for pp_rank, calls in got.calls:
        over = Counter({call: n for call, n in calls.items() if call[1].startswith("cp")})
        expected = expected_calls(case, pp_rank)
        assert over == expected, f"calls of pipeline rank {pp_rank}: {dict(over)}, by the formulas {dict(expected)}"
    alone = replace(case, tiled=False, beside="nothing" if case.beside == "offload" else case.beside)
    return got, one_process(alone.model, **options)


def worst_difference(case: ContextCase) -> tuple[float, str]:
    return worst_of(*outcomes(case))


class kernels_that_run:
    """Counts the kernels of blocks, by name, while it is open."""

    def __enter__(self) -> Counter:
        self.found, self.usual = Counter(), {}
        for kind in (block_attention.FlashBlocks, block_attention.TiledBlocks):
            self.usual[kind] = kind.add

            def add(blocks: Any, *arguments: Any, before=kind.add) -> None:
                self.found[type(blocks).__name__] += 1
                before(blocks, *arguments)

            kind.add = add
        return self.found

    def __exit__(self, *_: object) -> None:
        for kind, usual in self.usual.items():
            kind.add = usual


def expected_kernels(case: ContextCase) -> set[str]:
    if {*case.kinds} == {"a2a"}:
        return set()
    plain = case.texts == "one text" and not case.windows and case.dropout == 0 and case.scores == "plain"
    return {"FlashBlocks" if plain else "TiledBlocks"}


def expected_calls(case: ContextCase, pp_rank: int) -> Counter:
    """(op, axis, bytes) -> how often a rank of this pipeline stage calls it over the axis in a step: the formulas of each type."""
    layout, calls = case.layout, Counter()
    chunk = case.model.num_layers // (layout.pp * layout.v)
    for stage in layout.stages.of_rank(pp_rank):
        for place, layer in enumerate(range(stage * chunk, (stage + 1) * chunk)):
            again = layout.recompute in ("selective", "uniform 2") or (layout.recompute == "block 1" and place == 0)
            for call, count in _of_layer(case, case.kinds[layer], again).items():
                calls[call] += count * layout.m
    return calls


def _of_layer(case: ContextCase, kind: str, again: bool) -> Counter:
    layout, model, c = case.layout, case.model, case.cp
    rows, b = SEQ // c, BATCH // case.dp // layout.m
    heads, groups = model.num_attention_heads // layout.tp, max(1, model.query_groups // layout.tp)
    head = rows * b * model.head_width * BYTES
    if kind == "p2p":
        return Counter({("send", "cp", 2 * groups * head): (c - 1) * (2 + again) + c})
    if kind == "all_gather":
        pair = 2 * groups * head
        return Counter({("all_gather", "cp", pair): 1 + again, ("reduce_scatter", "cp", c * pair): 1})
    # The result's exchange keeps nothing, so that a recomputed core ends before it.
    results, calls = 2 + (again and layout.recompute != "selective"), Counter()
    among, dealt = ("cp", c) if kind == "a2a" else ("cp_heads", layout.cp_heads)
    ring = c // dealt
    pairs = math.lcm(groups, dealt)
    calls[("all_to_all", among, heads * head)] += 2 + again + results
    calls[("all_to_all", among, pairs * head)] += 2 * (2 + again)
    if case.texts == "mask":
        calls[("all_gather", among, rows * b * SEQ)] += 1 + again
    if ring > 1:  # all rows of the neighbours, of a share of the heads: as many elements
        calls[("send", "cp_ring", 2 * pairs * head)] += (ring - 1) * (2 + again) + ring
    return calls


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    matrix = Matrix(
        script="context_matrix",
        title="Context parallelism: combinations of types, axes, masks, dropout, recompute and positions that were run",
        text=(
            "This page counts the combinations of context parallelism with other features that were compared with one process.",
            "",
            "Each case trains a small GPT for two steps in float64, with ranks as threads. Every loss, gradient norm, gradient and weight is",
            "compared with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor. The collectives over the context-parallel",
            "axis must be those that the formula of the `--cp-comm-type` gives, and only the kernels of that type may run.",
        ),
        dimensions=DIMENSIONS,
        cases=covering_cases(3),
        total=len(covering_cases(3)),
        compare=worst_difference,
        sets={
            "every pair of choices with the axis or the type (the tests)": covering_cases(2, NEW),
            "every pair": covering_cases(2),
            "every triple, up to 16 ranks": covering_cases(3),
        },
    )
    return command(matrix, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
