"""Contender of this project's trainer, built from a command line like any run."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pretrain_bert
import pretrain_gpt
from megatron.core.base.dataclass_flags import flag_of
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.ops.compile.compiled_region import CompiledRegion, compile_cost, whole_layer_fallback_lines, why_not
from megatron.core.parallel import collectives
from megatron.training.evaluate_window_chosen_by_iteration import evaluate
from megatron.training.initialize import initialize_megatron
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tools.benchmarking.batches import CLIP, LR, SEED, WEIGHT_DECAY, Batches, Phases
from tools.benchmarking.work import Contender, Work

_SCRIPTS: dict[str, ModuleType] = {"gpt": pretrain_gpt, "llama": pretrain_gpt, "bert": pretrain_bert}


def command_line(work: Work, contender: Contender, device_name: str) -> list[str]:
    """Return the flags of a run."""
    settings = work.flags | {
        "train_iters": 1_000_000,
        "eval_iters": 0,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": CLIP,
        "seed": SEED,
        "lr_decay_style": "constant",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": work.vocab_size - 1,
        "mock_data": True,
        "device": device_name,
    }
    if contender.compile != "off":
        settings["compile"] = contender.compile
    words = []
    for name, value in settings.items():
        if value is False:
            continue
        words.append(flag_of(name))
        if value is not True:
            words.append(str(value))
    return words


class Ours:
    """Our trainer. step() trains one step; loss() returns the loss of the first batch, without dropout."""

    def __init__(self, contender: Contender, work: Work, device_name: str):
        script = _SCRIPTS[work.family]
        self.compiled = contender.compile != "off"
        self.eager_regions: list[str] = []
        self._record_eager_regions()
        with contextlib.redirect_stdout(None):
            runtime = initialize_megatron(argv=command_line(work, contender, device_name))
            self.trainer = Trainer(
                runtime,
                lambda sizes: (
                    range(sizes[0]),
                    None,
                    None,
                ),  # a data set whose length is used, and whose samples are not
                script.model_provider,
                script.forward_step,
            )
        self.work = work
        self.replica = runtime.mesh.samples.rank
        self.batches = self._new_batches()
        self.phases = Phases(runtime.device)

        # time the phases of a step
        pipeline = self.trainer.pipeline
        optimizer = self.trainer.optimizer
        timed = self.phases.timed
        pipeline.forward_step = timed("forward")(pipeline.forward_step)
        pipeline.run = timed("forward and backward")(pipeline.run)
        optimizer.step = timed("optimizer")(optimizer.step)
        optimizer.clip_factor = timed("clipping")(optimizer.clip_factor)

    def _record_eager_regions(self) -> None:
        """Record the name of each region for which the eager function is selected, to refuse a wrong measurement."""
        choose = CompiledRegion.select

        def choose_and_record(region: CompiledRegion, config: CompileConfig, device: Any) -> Callable[..., Any]:
            function = choose(region, config, device)
            if function == region.eager:
                self.eager_regions.append(region.eager.__name__)
            return function

        CompiledRegion.select = choose_and_record  # type: ignore[method-assign]

    def check_compiled(self) -> None:
        """Raise RuntimeError if something that --compile compiles ran eager. To be called after the first step."""
        if self.compiled and (self.eager_regions or not compile_cost().programs):
            names = ", ".join(sorted({*self.eager_regions})) or "everything"
            reason = why_not(self.trainer.device.type) or "the log of a run says why"
            raise RuntimeError(f"--compile: {names} ran eager ({reason}); there is nothing to compare")
        fallbacks = whole_layer_fallback_lines(self.trainer.model)
        if fallbacks:
            raise RuntimeError(f"{fallbacks[0]}; there is nothing to compare")

    def _new_batches(self) -> dict[int, Batches]:
        """Return the iterator of each model chunk."""
        return {stage: Batches(self.work, self.replica) for stage in self.trainer.pipeline.chunks}

    def loss(self) -> float | None:
        """Return the loss of the first batch without dropout; None on a rank without the last stage.

        Every rank must call. With dropout a BERT's loss is that of the tokens alone, as `Plain.loss` explains.
        """
        losses = evaluate(
            self.trainer.pipeline,
            lambda first: self._new_batches(),
            num_microbatches=self.trainer.pipeline.batch.num_microbatches,
            first_sample=0,
        )
        self.phases.take()
        if not losses:
            return None
        excluded = {"sop accuracy"}
        if self.work.has_dropout:
            excluded.add("sop loss")
        return sum(value for name, value in losses.items() if name not in excluded)

    def step(self) -> None:
        """Train one step. Every rank must call."""
        train_step(self.trainer.pipeline, self.trainer.optimizer, self.batches, first_sample=0, lr=LR)
        self.trainer.tidy_up()

    def meet(self) -> None:
        """Wait for all ranks."""
        collectives.barrier(self.trainer.mesh["world"], self.trainer.device)

    def take_phases(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        seconds = self.phases.take()
        seconds["backward"] = seconds.pop("forward and backward") - seconds.get("forward", 0.0)
        return seconds
