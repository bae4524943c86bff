"""Every optimizer, ZeRO stage and place of its state, saved in every way, resumed in the same layout and in another.

    python tests/campaigns/save_matrix.py results.jsonl --limit-minutes 10         triples of choices; goes on where it stopped

A case trains two steps of a tiny GPT with ranks as threads, in a layout in which a data-parallel rank may own no matrix, or nothing.

    saved       synchronously, beside training, and as a copy for restarts: tensor by tensor the same bits
    resumed     from the copy and from the checkpoint, in the same layout: the third step ends in the bits of the run that went on
    resharded   in another layout: what it loads, it saves again in the same bits; in float64 its third step is that of one process

Checkpoints are compared by `independent_reader`, which knows them by docs/checkpoint_format.md alone.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import torch
from case_runs import Matrix, command
from covering import Combined, covering
from independent_reader import Contents, differing, latest, read
from local_ranks import run_ranks
from reshard_campaign import ties_kept
from thread_writers import thread_writers
from tiny_run import TINY_GPT2, TINY_LLAMA, Layout, Texts, TinyTrainer
from torch import Tensor
from zero_matrix import several_slices

from megatron.core.dist_checkpointing.async_snapshot_to_writer_process import AsyncSaver
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.offload.tensor_in_memory_or_file import start_reading
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state, sharded_optimizer_state
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.checkpointing import non_persistent_checkpoint, save_and_load_run_state

VOCAB = 8
ONE_LAYER = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
MODELS = {
    "gpt2": replace(TINY_GPT2, **ONE_LAYER),
    "llama": replace(
        TINY_LLAMA, **ONE_LAYER, num_query_groups=1, ffn_hidden_size=32, untie_embeddings_and_output_weights=False
    ),
    "two layers": replace(TINY_GPT2, **ONE_LAYER | {"num_layers": 2}),
}
OPTIMIZER = {
    "adam": {},
    "adam-l2": {},
    "sgd": {},
    "sgd, no momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "lion": {},  # a script's own
    "muon": {},
    "muon, adam-l2": {"optimizer": "muon", "muon_scalar_optimizer": "adam-l2", "muon_split_qkv": False},
    "muon, sgd": {"optimizer": "muon", "muon_scalar_optimizer": "sgd", "muon_nesterov": True},
    "muon, sgd, no momentum": {"optimizer": "muon", "muon_scalar_optimizer": "sgd", "sgd_momentum": 0.0},
    "muon, lion": {"optimizer": "muon", "muon_scalar_optimizer": "lion", "muon_momentum": 0.0},
}
STAGES = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "1 overlapped": {
        "zero_stage": 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 300,
    },
    "1 hybrid": {"zero_stage": 1, "num_distributed_optimizer_instances": 2},
    "3 hybrid": {"zero_stage": 3, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
}
LAYOUTS = {"dp4": {"dp": 4}, "dp5": {"dp": 5}, "tp2-dp4": {"tp": 2, "dp": 4}, "pp2-dp4": {"pp": 2, "dp": 4, "m": 1}}
OTHERS = {
    "one process": {},
    "dp2, stage 0": {"dp": 2},
    "dp3, stage 1": {"dp": 3, "zero_stage": 1},
    "dp2, stage 3": {"dp": 2, "zero_stage": 3},
    "dp6, stage 1": {"dp": 6, "zero_stage": 1},
    "tp2-dp3, stage 1": {"tp": 2, "dp": 3, "zero_stage": 1},
    "pp2-dp3, stage 1": {"pp": 2, "dp": 3, "zero_stage": 1},
}
DIMENSIONS = {
    "optimizer": tuple(OPTIMIZER),
    "stage": tuple(STAGES),
    "layout": tuple(LAYOUTS),
    "other": tuple(OTHERS),
    "model": tuple(MODELS),
    "precision": ("fp64", "fp32", "bf16", "bf16, reuse", "fp16"),
    "offload": ("none", "host", "file", "half"),
    "copy": ("local", "global"),
}


@dataclass(frozen=True)
class SaveCase(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    optimizer: str
    stage: str
    layout: str
    other: str
    model: str
    precision: str
    offload: str
    copy: str

    def __str__(self) -> str:
        return "-".join(choice.replace(", ", "+").replace(" ", "_") for choice in self.choices)

    @property
    def ranks(self) -> int:
        return self.run_layout("").ranks

    @property
    def batch(self) -> int:
        return 60 if "dp5" in self.layout else 12

    @property
    def needs_whole(self) -> bool:
        return self.optimizer.startswith("muon")

    @property
    def can_be(self) -> bool:
        if self.needs_whole and (
            STAGES[self.stage]["zero_stage"] > 1
            or OTHERS[self.other].get("zero_stage", 0) > 1
            or self.offload != "none"
            or self.precision == "bf16, reuse"
        ):
            return False
        is_pipeline = "pp2" in self.layout or "pp2" in self.other
        if is_pipeline and self.model != "two layers":
            return False
        if "hybrid" in self.stage and "dp4" not in self.layout:
            return False
        return not (
            self.precision == "bf16, reuse" and STAGES[self.stage]["zero_stage"] == 3 and "hybrid" in self.stage
        )

    @property
    def config(self) -> ModelConfig:
        precision = self.precision.split(",")[0]
        chosen = {"fp32": {"fp64": False}, "fp64": {}}.get(precision, {"fp64": False, precision: True})
        return replace(MODELS[self.model], **chosen)

    @property
    def optimizer_config(self) -> OptimizerConfig:
        shared = {"optimizer": self.optimizer, "clip_grad": 0.5, "weight_decay": 0.1}
        return OptimizerConfig(**shared | OPTIMIZER[self.optimizer], reuse_fp32_param=self.precision == "bf16, reuse")

    def run_layout(self, folder: str) -> Layout:
        """folder: of offloaded state."""
        offload = {
            "none": {},
            "host": {"optimizer_cpu_offload": True},
            "file": {"offload_dir": folder, "offload_params": self.stage == "3"},
            "half": {"offload_dir": folder, "optimizer_offload_fraction": 0.5},
        }[self.offload]
        parallel = DataParallelConfig(**STAGES[self.stage])
        return Layout(**LAYOUTS[self.layout], data_parallel=parallel, offload=OffloadConfig(**offload))

    @property
    def other_layout(self) -> Layout:
        chosen = dict(OTHERS[self.other])
        return Layout(data_parallel=DataParallelConfig(zero_stage=chosen.pop("zero_stage", 0)), **chosen)


# ---------------------------------------------------------------- which


@cache
def covering_cases(strength: int) -> tuple[SaveCase, ...]:
    """Cases in which every `strength` choices of different dimensions occur together that can."""
    plain = {name: choices[0] for name, choices in DIMENSIONS.items()}
    seeds = [plain, plain | {"model": "two layers"}, plain | {"optimizer": "muon"}]
    seeds.append(plain | {"optimizer": "muon", "model": "two layers"})
    chosen = covering_cases(strength - 1) if strength > 2 else ()
    return covering(SaveCase, DIMENSIONS, strength, seeds=seeds, chosen=chosen)


@cache
def crossed_cases() -> tuple[SaveCase, ...]:
    """Every optimizer in every stage that it can have, with ranks that own nothing, loaded in a layout in which all own something.

    The other choices go round. These are for the test command.
    """
    found = []
    for optimizer, stage in product(OPTIMIZER, ("0", "1", "2", "3")):
        turn = len(found)
        rest = {
            "layout": "dp4",
            "other": tuple(OTHERS)[turn % 4],
            "model": ("gpt2", "llama")[turn // 3 % 2],
            "precision": ("fp64", "bf16", "fp64", "fp32", "bf16, reuse", "fp16")[turn % 6],
            "offload": DIMENSIONS["offload"][turn % 4],
            "copy": ("local", "global")[turn // 2 % 2],
        }
        plainer = (rest, rest | {"offload": "none"}, rest | {"offload": "none", "precision": "bf16"})
        simplest = plainer[-1] | {"other": "dp3, stage 1"}
        fits = [case for more in (*plainer, simplest) if (case := SaveCase(optimizer, stage, **more)).can_be]
        found += fits[:1]
    return tuple(found)


def owning(case: SaveCase) -> list[dict[str, int]]:
    """Of each rank: the elements of each kind of state that it owns."""

    def work(mesh: Any) -> dict[str, int]:
        trainer = trainer_of(case, mesh, case.run_layout(""))
        kinds = trainer.adam.tensors().items()
        return {kind: sum(tensor.numel() for tensor in tensors.values()) for kind, tensors in kinds}

    with own_optimizer():
        return ranks(case.run_layout(""), work, case.config)


# ---------------------------------------------------------------- a script's own optimizer


def lion_update(parameters: Any, gradients: Any, states: Any, step: Any) -> None:
    """w -= lr (sign(0.9 m + 0.1 g) + decay w), m = 0.99 m + 0.01 g (X. Chen and others, arXiv:2302.06675)."""
    for parameter, gradient, momentum in zip(parameters, gradients, states["exp_avg"], strict=True):
        gradient.mul_(step.factor)
        # A smooth stand-in for the sign, which would turn the rounding of a zero into a whole step.
        direction = (0.9 * momentum + 0.1 * gradient).mul_(100).tanh_()
        parameter.mul_(1 - step.lr * step.weight_decay).sub_(direction, alpha=step.lr)
        momentum.mul_(0.99).add_(gradient, alpha=0.01)


@contextlib.contextmanager
def own_optimizer() -> Iterator[None]:
    OPTIMIZERS["lion"] = UpdateRule(lambda config: lion_update, lambda config: ("exp_avg",), scales=True)
    try:
        yield
    finally:
        del OPTIMIZERS["lion"]


# ---------------------------------------------------------------- a case


class Wrong(AssertionError):
    """A case that did not end as promised."""


def trainer_of(case: SaveCase, mesh: Any, layout: Layout) -> TinyTrainer:
    scaler = None
    if case.precision == "fp16":
        scaler = DynamicGradScaler(16.0, minimum=1.0, window=2, hysteresis=1)
    return TinyTrainer(
        mesh,
        case.config,
        layout,
        global_batch=case.batch,
        optimizer=case.optimizer_config,
        texts=Texts(vocab=VOCAB),
        scaler=scaler,
    )


def copied_to(case: SaveCase, folder: Path) -> dict[str, Any]:
    """The settings of a copy after every step."""
    place = f"non_persistent_{case.copy}_ckpt_dir"
    return {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": case.copy, place: str(folder / "copies")}


def save(trainer: TinyTrainer, folder: Path, iteration: int) -> None:
    """A checkpoint below sync and, saved beside training, one below async."""
    trainer.save(folder / "sync", iteration)
    runtime = trainer.runtime(folder / "async")
    background = AsyncSaver(trainer.mesh["world"], runtime.device.torch_device)
    background.start(folder / "async", iteration, *saving(trainer, runtime))
    background.finish()
    background.close()


def save_local_checkpoint(case: SaveCase, trainer: TinyTrainer, folder: Path, iteration: int) -> None:
    (folder / "copied").mkdir(exist_ok=True)  # as a run makes its --save
    runtime = trainer.runtime(folder / "copied", **copied_to(case, folder))
    tensors, state = saving(trainer, runtime)
    config, device = runtime.config.checkpoint, runtime.device.torch_device
    non_persistent_checkpoint.save_local_checkpoint(config, iteration, tensors, state, trainer.mesh["world"], device)


def saving(trainer: TinyTrainer, runtime: Any) -> tuple[Any, Any]:
    return save_and_load_run_state.checkpoint_contents(runtime, trainer.model, trainer.adam, trainer.state, {})


def held(trainer: TinyTrainer) -> dict[str, Tensor]:
    """A copy of all weights and state that this rank holds."""
    trainer.finish_param_gather()
    tensors = sharded_model_state(trainer.model, trainer.mesh) | sharded_optimizer_state(trainer.adam, trainer.mesh)
    return {name: start_reading(local.tensor).wait().detach().clone() for name, local in tensors.items()}


def trained(case: SaveCase, folder: Path, steps: int) -> list[dict[str, Tensor]]:
    """Train, save, and take one step more; what each rank then holds."""

    def work(mesh: Any) -> dict[str, Tensor]:
        trainer = trainer_of(case, mesh, case.run_layout(str(folder / "offload")))
        for number in range(steps):
            trainer.step(number)
        save(trainer, folder, steps)
        save_local_checkpoint(case, trainer, folder, steps)
        trainer.step(steps)
        found = held(trainer)
        trainer.close()
        return found

    return ranks(case.run_layout(""), work, case.config)


def resumed(case: SaveCase, folder: Path, steps: int) -> dict[str, list[dict[str, Tensor]]]:
    """One step in the same layout, from the copy and then, in the same trainer, from the checkpoint saved beside training; what each
    rank then holds."""

    def work(mesh: Any) -> dict[str, dict[str, Tensor]]:
        found, trainer = {}, trainer_of(case, mesh, case.run_layout(str(folder / "offload")))
        for way, more in {"copied": copied_to(case, folder), "async": {}}.items():
            trainer.load(folder / way, **more)
            trainer.step(steps)
            found[way] = held(trainer)
        trainer.close()
        return found

    by_rank = ranks(case.run_layout(""), work, case.config)
    return {way: [found[way] for found in by_rank] for way in by_rank[0]}


def resharded(case: SaveCase, folder: Path, steps: int) -> None:
    """Load in the other layout, save what was loaded, and take one step more."""

    def work(mesh: Any) -> None:
        trainer = trainer_of(case, mesh, case.other_layout)
        trainer.load(folder / "sync")
        save(trainer, folder / "other", steps)
        if case.precision == "fp64":
            trainer.step(steps)
            trainer.save(folder / "other went on", steps + 1)

    ranks(case.other_layout, work, case.config)


def ranks(layout: Layout, work: Any, config: ModelConfig) -> list[Any]:
    said, stages = io.StringIO(), layout.stages if layout.pp > 1 else None
    sharing = config.ranks_per_kv_head(layout.tp)
    with contextlib.redirect_stdout(said), thread_writers(), several_slices():
        found = run_ranks(layout.sizes, work, stages=stages, ranks_per_kv_head=sharing)
    if "WARNING" in said.getvalue():
        raise Wrong(said.getvalue())
    return found


@cache
def one_process(optimizer: str, model: str, batch_of: str, steps: int) -> dict[str, Any]:
    """The tensors of a run of one process in float64, after `steps` steps of the batches of a layout."""
    case = SaveCase(optimizer, "0", batch_of, "one process", model, "fp64", "none", "local")
    with tempfile.TemporaryDirectory() as folder:

        def work(mesh: Any) -> None:
            trainer = trainer_of(case, mesh, Layout())
            for number in range(steps):
                trainer.step(number)
            trainer.save(Path(folder), steps)

        ranks(Layout(), work, case.config)
        return read(latest(Path(folder))).tensors


def check_same_bits(what: str, got: Contents, expected: Contents, *, reuses: bool = False) -> None:
    tensors = expected.tensors
    if reuses:
        tensors = {name: ties_kept(x) if "/master/" in name else x for name, x in tensors.items()}
    if wrong := differing(got.tensors, tensors):
        raise Wrong(f"{what}: {len(wrong)} tensors differ, such as {wrong[:3]}")
    steps, wanted = got.state["optimizer_steps"], expected.state["optimizer_steps"]
    if steps != wanted:
        raise Wrong(f"{what}: {steps} steps of the optimizer, not {wanted}")


def check_same_held(what: str, got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        same = {name: torch.equal(tensor, theirs[name]) for name, tensor in mine.items()}
        if mine.keys() != theirs.keys() or not all(same.values()):
            raise Wrong(f"{what}: rank {rank} holds other bits of {[name for name in same if not same[name]][:3]}")


def global_copy(folder: Path) -> Contents:
    (manifest,) = folder.glob("copies/*/slot_*/iter_*/manifest.json")
    return read(manifest.parent)


def worst_difference(case: SaveCase, steps: int = 2) -> tuple[float, str]:
    """The largest relative difference from one process after a step more in another layout, in float64; 0 in other precisions.
    Raises Wrong where bits should be the same and are not."""
    with tempfile.TemporaryDirectory() as name, own_optimizer():
        folder = Path(name)
        went_on = trained(case, folder, steps)
        source = read(latest(folder / "sync"))
        check_same_bits("saved beside training", read(latest(folder / "async")), source)
        if case.copy == "global":
            check_same_bits("global copy", global_copy(folder), source)
        for way, found in resumed(case, folder, steps).items():
            check_same_held(f"resumed from {way}", found, went_on)
        resharded(case, folder, steps)
        moved, reuses = folder / "other", case.precision == "bf16, reuse"
        check_same_bits("resharded", read(latest(moved / "sync")), source, reuses=reuses)
        check_same_bits("resharded, saved beside training", read(latest(moved / "async")), source, reuses=reuses)
        if case.precision != "fp64":
            return 0.0, "bits"
        found = read(latest(folder / "other went on")).tensors
        return worst_of(found, one_process(case.optimizer, case.model, case.layout, steps + 1))


def worst_of(got: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    if got.keys() != expected.keys():
        raise Wrong(f"{sorted(got.keys() ^ expected.keys())[:3]} are in one checkpoint only")
    worst = (0.0, "")
    for name, tensor in expected.items():
        scale = abs(tensor.values).max()
        difference = abs(got[name].values - tensor.values).max()
        worst = max(worst, (float(difference / scale) if scale else float(difference), name))
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    covered = {strength: covering_cases(strength) for strength in (2, 3)}
    matrix = Matrix(
        script="save_matrix",
        title="Saves: how much of save, resume and reshard has been run",
        text=("Each case saves in three ways, and loads in the same layout and in another.",),
        dimensions=DIMENSIONS,
        cases=covered[3],
        total=len(covered[3]),
        compare=worst_difference,
        sets={"every pair of choices": covered[2], "every triple of choices": covered[3]},
    )
    return command(matrix, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
