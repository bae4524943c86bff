"""A T5 in every layout and with every feature that it can have, against one process: what test_t5 and the sweep share.

A case has one choice of each dimension. Ranks are threads, in float64: losses, norms, gradients and weights of two steps, each
tensor to 1e-10 of its largest value. The tests run cases in which every choice occurs, `tests/campaigns/parity_sweep.py --t5` those in which
every pair does, then every triple, of jobs up to 16 ranks. In bfloat16 a case is as near to float64 as half precision can be.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from tempfile import TemporaryDirectory

import pretrain_t5
from case_runs import about, choices_run, differing
from covering import Combined, covering
from layouts import Layout
from parity_cases import BUCKET, TOLERANCE, worst_of
from refusals import BASE, MOCK, T5_APART
from tiny_run import Outcome, run
from tiny_t5 import CONFIGS, DECODER, T5

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.models.common.model_rules import T5_RULES
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check
from megatron.training.make_chunks_optimizer_and_pipeline import refuse_shared_embeddings

PIPELINES = {  # ranks, chunks of each, schedule, the rank where the decoder begins
    "1 stage": (1, 1, "1f1b", None),
    "1f1b": (2, 1, "1f1b", None),
    "4 stages": (4, 1, "1f1b", None),
    "gpipe": (2, 1, "gpipe", None),
    "zb-h1": (2, 1, "zb-h1", None),
    "interleaved": (2, 2, "interleaved", None),
    "zb-interleaved": (2, 2, "zb-interleaved", None),
    "zb-v": (2, 2, "zb-v", None),
    "split 1 of 2": (2, 1, "1f1b", 1),
    "split 1 of 2, zb-h1": (2, 1, "zb-h1", 1),
    "split 2 of 3": (3, 1, "1f1b", 2),
    "split 1 of 3": (3, 1, "gpipe", 1),
}
STACKS = {"2 and 2": (2, 2), "3 and 1": (3, 1), "1 and 3": (1, 3)}  # layers of the encoder and of the decoder
STYLES = {"relative": CONFIGS["t5"], "learned": CONFIGS["learned"]}
BESIDE: dict[str, dict] = {  # of the model
    "nothing": {},
    "fixed order": {},
    "muon": {},
    "offload": {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 0},  # and masters and moments
    "files": {},  # masters and moments in files, and with ZeRO 3 parameters
    "tiled": {"tiled_mlp": 2, "tiled_loss": 2},
    "losses": {"label_smoothing": 0.1, "z_loss_coeff": 0.01},
    "multipliers": {
        **{"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "logit_multiplier": 0.25},
        **{"final_logit_softcapping": 1.5, "add_output_bias": True, "apply_layernorm_1p": True},
    },
    "packed inputs": {"contiguous_checkpointing": True, "distribute_saved_activations": True},
}
DIMENSIONS: dict[str, tuple] = {
    "cp": ("none", "p2p", "all_gather", "a2a", "a2a+p2p", "mixed"),  # mixed: another type in each layer
    "tp": ("1", "2", "2sp", "4", "4sp"),
    "pipeline": tuple(PIPELINES),
    "stacks": tuple(STACKS),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "overlap": (False, True),
    "style": tuple(STYLES),
    "mlp": ("relu", "gated"),
    "tied": (True, False),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "selective", "all parts", "uniform 2", "block 1"),
    "beside": tuple(BESIDE),
    "scatter": (True, False),
    "delayed": (False, True),
}
HALF = "bfloat16"
# Gated alone: where a rounding moves a number over ReLU's kink, its whole gradient comes or goes.
HALF_DIMENSIONS = DIMENSIONS | {"cp": ("none", "p2p"), "tp": ("1", "2", "2sp"), "mlp": ("gated",), "beside": (HALF,)}
ROUNDING = 2.0**-8  # of bfloat16
RANKS, BATCH = 16, 4
_KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
_FULL = ("uniform 2", "block 1")


@dataclass(frozen=True)
class T5Case(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    cp: str
    tp: str
    pipeline: str
    stacks: str
    dp: int
    zero: int
    overlap: bool
    style: str
    mlp: str
    tied: bool
    dropout: float
    recompute: str
    beside: str
    scatter: bool
    delayed: bool

    @property
    def ranks(self) -> int:
        return (1 + (self.cp != "none")) * int(self.tp[0]) * PIPELINES[self.pipeline][0] * self.dp

    @property
    def can_be(self) -> bool:
        """Whether it fits, differs from other cases, and no rule refuses it (docs/t5_matrix.md lists the rules)."""
        (pp, _, _, split), (encoder, decoder), tp = PIPELINES[self.pipeline], STACKS[self.stacks], int(self.tp[0])
        needs_one_table = self.zero == 3 or self.beside == "fixed order"
        heads = 1 if self.cp in ("none", "p2p", "all_gather") else 2
        cannot = (
            split is not None and (encoder % split or decoder % (pp - split)),
            self.pipeline == "zb-v" and self.tied and needs_one_table,
            self.zero > 1 and self.beside in ("muon", "fixed order"),
            self.beside == "files" and self.zero == 0,
            self.beside == "offload" and (self.zero == 0 or self.recompute == "all parts"),
            self.beside == "tiled" and self.recompute == "all parts",
            self.beside == "packed inputs" and (self.recompute not in _FULL or self.tp not in ("2", "4")),
            4 % (tp * heads) > 0,  # heads
            self.cp != "none" and self.tp.endswith("sp") and DECODER // 2 % tp > 0,
            self.cp != "none" and self.tp.endswith("sp") and self.beside == "tiled",  # a rank has one token
            self.tp == "4sp" and self.beside == "tiled",
            not self.scatter and (pp == 1 or self.tp not in ("2", "4")),
            self.overlap and (self.dp == 1 or self.beside == "fixed order"),
        )
        return self.ranks <= RANKS and not any(cannot)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}-{self.pipeline}-{self.stacks}-dp{self.dp}-zero{self.zero}"]
        parts += [f"cp2 {self.cp}"] * (self.cp != "none") + ["overlap"] * self.overlap
        parts += [self.style, self.mlp, "tied" if self.tied else "untied"] + ["dropout"] * (self.dropout > 0)
        parts += [x for x in (self.recompute,) if x != "none"] + [x for x in (self.beside,) if x != "nothing"]
        parts += ["whole"] * (not self.scatter) + ["delayed"] * self.delayed
        return "-".join(parts).replace(", ", "/").replace(" ", "")

    @property
    def plain(self) -> ModelConfig:
        """Shape and style, without what stands beside."""
        encoder, decoder = STACKS[self.stacks]
        gated = {"gated": True, "activation": "gelu-tanh"} if self.mlp == "gated" else {"activation": "relu"}
        return replace(
            STYLES[self.style],
            num_layers=encoder,
            decoder_num_layers=decoder,
            untie_embeddings_and_output_weights=not self.tied,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            **gated,
        )

    @property
    def model(self) -> ModelConfig:
        return replace(self.layout("").applied_to(self.plain), **_changes(self.beside))

    @property
    def alone(self) -> ModelConfig:
        """What one process trains for comparison: kept, computed and held plainly."""
        changes_numbers = self.beside not in ("offload", "tiled", "packed inputs", "files")
        return replace(self.plain, **_changes(self.beside)) if changes_numbers else self.plain

    @property
    def optimizer(self) -> OptimizerConfig:
        # The gradient of a key's bias is zero but for rounding, which a small epsilon of Adam's would make a step of.
        shared = {"clip_grad": 0.5, "weight_decay": 0.1, "adam_eps": 1e-5}
        if (
            self.beside == HALF
        ):  # Adam's first steps are signs of the gradient: where that is rounding, runs part by a whole step
            return OptimizerConfig(optimizer="sgd", clip_grad=0.0, weight_decay=0.0)
        return OptimizerConfig(optimizer="muon", **shared) if self.beside == "muon" else OptimizerConfig(**shared)

    def layout(self, folder: str) -> Layout:
        """folder: for files of what is offloaded."""
        pp, v, schedule, split = PIPELINES[self.pipeline]
        layers = sum(STACKS[self.stacks])
        each = tuple(_KINDS[layer % 4] for layer in range(layers)) if self.cp == "mixed" else (self.cp,)
        return Layout(
            tp=int(self.tp[0]),
            sp=self.tp.endswith("sp"),
            pp=pp,
            dp=self.dp,
            cp=1 if self.cp == "none" else 2,
            cp_heads=1 if self.cp == "none" else 2,
            cp_types=("p2p",) if self.cp == "none" else each,
            m=2,
            v=v,
            split=split,
            schedule=schedule,
            recompute=self.recompute,
            scatter=self.scatter,
            data_parallel=DataParallelConfig(
                zero_stage=self.zero,
                overlap_grad_reduce=self.overlap,
                overlap_param_gather=self.overlap and self.zero > 0,
                ddp_bucket_size=BUCKET if self.overlap else None,
                fixed_order_grad_reduce=self.beside == "fixed order",
            ),
            offload=OffloadConfig(
                optimizer_cpu_offload=self.beside == "offload",
                offload_dir=folder if self.beside == "files" else None,
                offload_params=self.beside == "files" and self.zero == 3,
            ),
            delayed=self.delayed,
        )


def _changes(beside: str) -> dict:
    return {"fp64": False, "bf16": True} if beside == HALF else BESIDE[beside]


_FIRST = {name: choices[0] for name, choices in DIMENSIONS.items()}
_SEEDS = (
    _FIRST,
    _FIRST | {"dp": 2},
    _FIRST | {"zero": 1},
    _FIRST | {"tied": False},
    _FIRST | {"recompute": "uniform 2", "tp": "2"},
    _FIRST | {"tp": "2", "pipeline": "1f1b"},
    _FIRST | {"tp": "2", "pipeline": "1f1b", "zero": 1},
    _FIRST | {"stacks": "1 and 3"},
    _FIRST | {"stacks": "3 and 1"},
    _FIRST | {"stacks": "3 and 1", "dp": 2},
    _FIRST | {"stacks": "1 and 3", "tp": "2", "recompute": "uniform 2"},
)


@cache
def t5_cases(strength: int) -> tuple[T5Case, ...]:
    """Cases in which every `strength` choices of different dimensions occur together that can; those of the smaller strength
    come first."""
    chosen = t5_cases(strength - 1) if strength > 1 else ()
    return covering(T5Case, DIMENSIONS, strength, seeds=_SEEDS, chosen=chosen)


@cache
def half_cases(strength: int) -> tuple[T5Case, ...]:
    """Those in bfloat16, likewise."""
    return covering(
        T5Case, HALF_DIMENSIONS, strength, seeds=[seed | {"mlp": "gated", "beside": HALF} for seed in _SEEDS]
    )


def swept_cases() -> tuple[T5Case, ...]:
    """Those of the sweep."""
    return *t5_cases(2), *half_cases(2), *t5_cases(3)[len(t5_cases(2)) :]


@cache
def _one_process(model: ModelConfig, steps: int, optimizer: OptimizerConfig) -> Outcome:
    return run(model, Layout(), global_batch=BATCH, steps=steps, subject=T5, optimizer=optimizer)


def outcomes(case: T5Case, steps: int = 2) -> tuple[Outcome, Outcome]:
    """What the case computes, and what one process does."""
    options = {"steps": steps, "optimizer": case.optimizer}
    with TemporaryDirectory() as folder:
        got = run(case.model, case.layout(folder), global_batch=BATCH, subject=T5, **options)
    return got, _one_process(case.alone, **options)


def worst_t5_difference(case: T5Case) -> tuple[float, str]:
    return beyond_rounding(case) if case.beside == HALF else worst_of(*outcomes(case))


def beyond_rounding(case: T5Case) -> tuple[float, str]:
    """(0 or by how much a case in half precision is further from float64 than that may be, in parts of this; where).

    At most 16 roundings of a tensor's norm, as tests/ranks/optimizer/test_precision.py allows, here of any layout; a missing or doubled
    term would be of the size of the gradient.
    """
    got, _ = outcomes(case)
    exact = _one_process(case.plain, steps=2, optimizer=case.optimizer)
    found = [
        (abs(a - b) / (ROUNDING * b), f"loss of step {i}") for i, (a, b) in enumerate(zip(got.losses, exact.losses))
    ]
    for mine, true in (*zip(got.grads, exact.grads, strict=True), (got.weights, exact.weights)):
        for name, value in true.items():
            error = (mine[name].double() - value).norm() / value.norm()
            found.append((error.item() / (16 * ROUNDING), name))
    worst, where = max(found)
    return max(worst - 1, 0.0), where


# ---------------------------------------------------------------- the page in docs


def refused(ranks: int, flags: str) -> str:
    """What pretrain_t5.py says about a command line, before its processes meet."""
    words = shlex.split(f"{BASE} {MOCK} --decoder-seq-length 16 {flags}")
    try:
        config = parse_args(words, args_defaults=pretrain_t5.DEFAULTS | {"decoder_num_layers": 0}).config
        check(config, ranks)
        problems = T5_RULES.problems(config, build_tokenizer(config.tokenizer))
    except ConfigError as error:
        problems = error.problems
    return " ".join(problems)


def t5_report(results: Sequence[dict]) -> str:
    """docs/t5_matrix.md."""
    failed = sum(not result["ok"] for result in results)
    names = {result["case"] for result in results}
    lines = [
        "# T5: combinations of axes and features that were run",
        "",
        "This page counts the combinations of features that were compared with one process for a [T5](t5.md), and lists those that are refused.",
        "",
        "Each case trains a small T5 for two steps in float64, with ranks as threads. Losses, norms, gradients and weights are compared with",
        f"the run of one process: max |a - b| <= {TOLERANCE:.0e} max |b|, tensor by tensor. `tests/support/t5_cases.py` defines the cases. The first",
        "command runs cases until its time is up, and resumes where it stopped; the second writes this page:",
        "",
        "    python tests/campaigns/parity_sweep.py results.jsonl --t5 --limit-minutes 60",
        "    python tests/campaigns/parity_sweep.py results.jsonl --t5 --report docs/t5_matrix.md",
        "",
        f"**{len(names)} of {len(swept_cases())} cases have been run; {failed} differ.** This took "
        f"{sum(result['seconds'] for result in results) / 60:.0f} minutes.",
        "",
        *(
            f"- every {what}: {len(names & set(map(str, t5_cases(strength))))} of {len(t5_cases(strength))} cases"
            for strength, what in (
                (1, "choice (the tests)"),
                (2, "pair of choices"),
                (3, f"triple, up to {RANKS} ranks"),
            )
        ),
        f"- in bfloat16, within what rounding allows (`beyond_rounding` in that file), every pair: {len(names & set(map(str, half_cases(2))))} "
        f"of {len(half_cases(2))} cases",
        *about(results),
        "",
        "| dimension | cases run, by choice |",
        "|---|---|",
        *choices_run(DIMENSIONS | {"beside": (*BESIDE, HALF)}, results),
        "",
        *differing(results),
    ]
    lines += [
        "## What cannot be combined",
        "",
        "These combinations are refused with the message shown, before the ranks communicate:",
        "",
    ]
    lines += ["| combination | flags | message |", "|---|---|---|"]
    lines += [
        f"| {what} | `{flags.strip()}` | {refused(ranks, flags)} |" for what, (ranks, flags, _) in T5_APART.items()
    ]
    try:
        refuse_shared_embeddings(["the word table"], DataParallelConfig(zero_stage=3))
    except ConfigError as error:
        said, flags = " ".join(error.problems), "--pipeline-schedule zb-v --zero-stage 3"
        lines += [
            f"| ZB-V with tied embeddings, and ZeRO 3 or sums in a fixed order; refused when the model is built | `{flags}` | {said} |"
        ]
    lines += [
        "",
        "[t5.md](t5.md#what-is-not-built) lists the features that a T5 does not have at all, such as rotary positions and grouped queries.",
    ]
    return "\n".join(lines).rstrip() + "\n"
