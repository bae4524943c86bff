"""Compute a bad step again, from the dump that a run wrote below --bad-step-dir, and name what is bad in it.

    python tools/replay_step.py bad_steps
    torchrun --nproc-per-node 2 tools/replay_step.py bad_steps --tensor-model-parallel-size 2

Model, precision, batches and dropout masks are the dump's; the layout is this command's, one process unless flags say otherwise.
Further flags are those of pretraining (--device cpu). --model mine/pretrain.py is the script that trained, unless it was
pretrain_gpt.py. Data and tokenizer files are not needed.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError, build, changes, flags_of, option_fields
from megatron.core.base.output_streams import until_reader_ends
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor, open_checkpoint
from megatron.core.dist_checkpointing.lost_buffers import lost_buffers
from megatron.core.sharding.boxes import whole
from megatron.training.arguments.config import COMPONENTS
from megatron.training.batch_cache import KeptBatches
from megatron.training.global_vars import print_rank_0, set_runtime
from megatron.training.initialize import initialize_megatron
from megatron.training.rerun.nan_locator import first_bad_tensor
from megatron.training.rerun.step_dump import BATCH, exact_numbers
from megatron.training.step import StepFigures, StepWork
from megatron.training.trainer import Trainer
from tools.script import script_at

CARRIED = ("transformer", "optimizer", "masked_data")  # components of the dump's settings
CARRIED_KNOBS = {
    "training": ("seed",),
    "data": ("seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
}


class DumpedSamples:
    """The step's samples under their numbers in the run."""

    def __init__(self, checkpoint: Checkpoint, first: int):
        self._first = first
        records = {name: r for name, r in checkpoint.manifest.tensors.items() if name.startswith(BATCH)}
        tensors = {name: torch.empty(r.shape, dtype=getattr(torch, r.dtype)) for name, r in records.items()}
        boxes = {name: [(whole(x.shape), whole(x.shape))] for name, x in tensors.items()}
        checkpoint.read_into({n: LocalTensor(x, tuple(x.shape), boxes[n], is_writer=False) for n, x in tensors.items()})
        self.columns: dict[str, np.ndarray] = {name.removeprefix(BATCH): x.numpy() for name, x in tensors.items()}
        if not self.columns:
            raise ConfigError(
                f"{checkpoint.folder} holds no batches: the script's batches are no dictionaries of tensors"
            )

    def __len__(self) -> int:
        return self._first + len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {key: column[number - self._first] for key, column in self.columns.items()}


def words_of(component: str, values: Mapping[str, Any], names: tuple[str, ...] | None = None) -> Iterator[str]:
    """A component's settings that are not the default, as words of a command line."""
    fields = {field.name: field for field in option_fields(COMPONENTS[component])}
    config = build(COMPONENTS[component], {name: value for name, value in values.items() if name in fields})
    for name, (_, value) in changes(config).items():
        if value is None or (names is not None and name not in names):
            continue
        yield flags_of(fields[name])[0]
        if not isinstance(value, bool):
            yield from map(str, value if isinstance(value, list) else [value])


def command_line(state: Mapping[str, Any], root: str) -> list[str]:
    """The words of a run that stands before the dumped step."""
    settings, step = state["config"], state["bad_step"]
    words = [word for name in CARRIED for word in words_of(name, settings[name])]
    words += [word for name, names in CARRIED_KNOBS.items() for word in words_of(name, settings[name], names)]
    scale = state["grad_scaler"].get("scale")
    words += [] if scale is None else ["--initial-loss-scale", str(scale)]
    batch = ["--micro-batch-size", str(step["micro_batch_size"]), "--global-batch-size", str(step["samples"])]
    words += [*batch, "--train-iters", str(state["train"]["iteration"] + 1), "--lr", "0.001", "--eval-iters", "0"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(state["vocab_size"] - 1), "--mock-data"]
    # The step is computed with the buffers as they begin, which a WARNING says.
    lost = ["--allow-lost-buffers"] if lost_buffers(state) else []
    return [*words, "--load", root, "--no-load-optim", "--allow-tokenizer-change", *lost]


def compare(step: Mapping[str, Any], figures: StepFigures) -> Iterator[str]:
    """A line a number: whether it comes again."""
    for name, text in exact_numbers(figures).items():
        now, then = float.fromhex(text), float.fromhex(step[name])
        if now == then or (math.isnan(now) and math.isnan(then)):
            verdict = "comes again, to the bit"
        else:
            apart = abs(now - then) / abs(then) if math.isfinite(then) and then else math.inf
            verdict = f"is another: {then!r} in the run, {apart:.1e} of it apart"
        yield f"{name:>7} {now!r} {verdict}"


def replay(root: str, model: str, more: list[str]) -> None:
    """Compute the step again and print what comes of it. Every rank calls."""
    try:
        checkpoint = open_checkpoint(Path(root))
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{root} holds no dump of a step: {error}; give the folder of --bad-step-dir") from None
    state, step = checkpoint.state, checkpoint.state.get("bad_step")
    if step is None:
        raise ConfigError(
            f"{checkpoint.folder} is a checkpoint, and no dump of a step; give the folder of --bad-step-dir"
        )
    script, samples = script_at(model), DumpedSamples(checkpoint, step["first_sample"])
    runtime = initialize_megatron(
        script.extra_args_provider,
        script.args_defaults,
        argv=[*command_line(state, root), *more],
        rules=script.rules,
        **script.ranks_of,
    )
    try:
        trainer = Trainer(
            runtime, lambda sizes: (samples, None, None), script.model_provider, script.forward_step, script.group_of
        )
        data = trainer.training_data()
        m = step["samples"] // runtime.samples_at_once
        work = StepWork(trainer.pipeline, trainer.optimizer, data, step["first_sample"], m)
        for batches in data.values():
            if isinstance(batches, KeptBatches):
                batches.begin()
        print_rank_0(f"iteration {state['train']['iteration'] + 1} of the run: {step['text']}")
        for line in compare(step, work.compute()):
            print_rank_0(line)
        print_rank_0(first_bad_tensor(work, runtime.device.torch_device))
    finally:
        runtime.held.close()
        set_runtime(None)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("dump", metavar="DIR", help="the folder of --bad-step-dir")
    parser.add_argument("--model", default="gpt", help="gpt, bert, t5, or the script that trained")
    given, more = parser.parse_known_args(arguments)
    try:
        replay(given.dump, given.model, more)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    finally:
        parallel_state.stop_distributed()


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
