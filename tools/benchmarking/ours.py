"""This project's trainer as a contender, built from a command line like any run."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pretrain_bert
import pretrain_gpt
from megatron.core.base.dataclass_flags import flag_of
from megatron.core.ops.compile.compiled_region import (
    CompileConfig,
    CompiledRegion,
    compile_cost,
    compile_fallback_lines,
    why_not,
)
from megatron.core.parallel import collectives
from megatron.training.evaluate import evaluate
from megatron.training.initialize import initialize_megatron
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tools.benchmarking.batches import CLIP, LR, SEED, WEIGHT_DECAY, Batches, Phases
from tools.benchmarking.work import Contender, Work

_SCRIPTS: dict[str, ModuleType] = {"gpt": pretrain_gpt, "llama": pretrain_gpt, "bert": pretrain_bert}


def command_line(work: Work, contender: Contender, device_name: str) -> list[str]:
    """The run's flags."""
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
    given = {flag_of(name): value for name, value in settings.items() if value is not False}
    return [word for flag, value in given.items() for word in ([flag] if value is True else [flag, str(value)])]


class Ours:
    """step() trains once and returns the mean loss; loss() is that of the first batch, without dropout."""

    def __init__(self, contender: Contender, work: Work, device_name: str):
        script = _SCRIPTS[work.family]
        self.compiled, self.chosen_eager = contender.compile != "off", []
        self._note_regions_that_run_eager()
        with contextlib.redirect_stdout(None):
            runtime = initialize_megatron(argv=command_line(work, contender, device_name))
            self.trainer = Trainer(
                runtime,
                lambda sizes: (range(sizes[0]), None, None),  # has a length, is never read
                script.model_provider,
                script.forward_step,
            )
        self.work, self.replica = work, runtime.mesh.samples.rank
        self.batches = self._new_batches()
        self.phases = Phases(runtime.device)
        pipeline, optimizer = self.trainer.pipeline, self.trainer.optimizer
        timed = self.phases.timed
        pipeline.forward_step = timed("forward")(pipeline.forward_step)
        pipeline.run = timed("forward and backward")(pipeline.run)
        optimizer.step = timed("optimizer")(optimizer.step)
        optimizer.clip_factor = timed("clipping")(optimizer.clip_factor)

    def _note_regions_that_run_eager(self) -> None:
        choose = CompiledRegion.select

        def noted(region: CompiledRegion, config: CompileConfig, device: Any) -> Callable[..., Any]:
            found = choose(region, config, device)
            if found == region.eager:
                self.chosen_eager.append(region.eager.__name__)
            return found

        CompiledRegion.select = noted  # type: ignore[method-assign]

    def check_compiled(self) -> None:
        """RuntimeError if --compile was asked for and something that it compiles ran eager. After the first step."""
        if self.compiled and (self.chosen_eager or not compile_cost().programs):
            what = ", ".join(sorted({*self.chosen_eager})) or "everything"
            reason = why_not(self.trainer.device.type) or "the log of a run says why"
            raise RuntimeError(f"--compile: {what} ran eager ({reason}); there is nothing to compare")
        if in_parts := compile_fallback_lines(self.trainer.model):
            raise RuntimeError(f"{in_parts[0]}; there is nothing to compare")

    def _new_batches(self) -> dict[int, Batches]:
        return {stage: Batches(self.work, self.replica) for stage in self.trainer.pipeline.chunks}

    def loss(self) -> float | None:
        """Of the words alone where a BERT has dropout. Every rank must call."""
        options = {"num_microbatches": self.trainer.pipeline.batch.num_microbatches, "first_sample": 0}
        found = evaluate(self.trainer.pipeline, lambda first: self._new_batches(), **options)
        self.phases.take()
        if not found:
            return None
        left_out = {"sop accuracy", *(["sop loss"] if self.work.has_dropout else [])}
        return sum(value for name, value in found.items() if name not in left_out)

    def step(self) -> None:
        train_step(self.trainer.pipeline, self.trainer.optimizer, self.batches, first_sample=0, lr=LR)
        self.trainer.tidy_up()

    def meet(self) -> None:
        """Wait for all ranks."""
        collectives.barrier(self.trainer.mesh["world"], self.trainer.device)

    def take_phases(self) -> dict[str, float]:
        seconds = self.phases.take()
        seconds["backward"] = seconds.pop("forward and backward") - seconds.get("forward", 0.0)
        return seconds
