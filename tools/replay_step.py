"""Rerun a bad step from the dump that a run wrote below --bad-step-dir, and name the first bad tensor.

    python tools/replay_step.py bad_steps
    torchrun --nproc-per-node 2 tools/replay_step.py bad_steps --tensor-model-parallel-size 2

Model, precision, batches and dropout masks are the dump's; the layout is this command's, one process unless flags say otherwise.
Further flags are those of pretraining (--device cpu). --model mine/pretrain.py is the script that trained, unless it was
pretrain_gpt.py. Data and tokenizer files are not needed.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.version import version_text
from tools.errors import answer_help


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version_text(), help="print the version")
    parser.add_argument("dump", metavar="DIR", help="the folder of --bad-step-dir")
    parser.add_argument("--model", default="gpt", help="gpt, bert, t5, or the script that trained")
    return parser


if __name__ == "__main__":
    answer_help(make_parser)

import numpy as np
import torch

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError, build, changes, flags_of, option_fields
from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor, open_checkpoint
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import lost_buffers
from megatron.core.sharding.boxes import whole
from megatron.training.arguments.config import COMPONENTS
from megatron.training.global_vars import print_rank_0, set_runtime
from megatron.training.initialize import initialize_megatron, stop_with
from megatron.training.result_checks.nan_locator import first_nonfinite_tensor
from megatron.training.result_checks.step_dump import BATCH, exact_numbers
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.step import StepFigures, StepWork
from megatron.training.trainer import Trainer
from tools.script import script_at

# Settings of the dump that the rerun takes: whole components, and single fields of others.
COMPONENTS_TAKEN = ("transformer", "optimizer", "masked_data")
FIELDS_TAKEN = {
    "training": ("seed",),
    "data": ("seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
}


class DumpedSamples:
    """Data set of the step's samples, under their numbers in the run. first: number of the step's first sample."""

    def __init__(self, checkpoint: Checkpoint, first: int):
        self._first = first
        self.columns: dict[str, np.ndarray] = {}  # key of a batch -> [samples, ...]
        targets: dict[str, LocalTensor] = {}
        for name, record in checkpoint.manifest.tensors.items():
            if name.startswith(BATCH):
                tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
                box = whole(tensor.shape)
                targets[name] = LocalTensor(tensor, tuple(tensor.shape), [(box, box)], is_writer=False)
                self.columns[name.removeprefix(BATCH)] = tensor.numpy()  # shares memory, which is read into below
        checkpoint.read_into(targets)
        if not self.columns:
            raise ConfigError(
                f"{checkpoint.folder} contains no batches: the script's batches are not dictionaries of tensors"
            )

    def __len__(self) -> int:
        return self._first + len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Return a sample by its number in the run: key -> array [..], a row of the column [samples, ..]."""
        return {key: column[number - self._first] for key, column in self.columns.items()}


def words_of(component: str, values: Mapping[str, Any], names: tuple[str, ...] | None = None) -> Iterator[str]:
    """Yield a component's settings that are not the default, as words of a command line. names: default: all fields."""
    fields = {field.name: field for field in option_fields(COMPONENTS[component])}
    config = build(COMPONENTS[component], {name: value for name, value in values.items() if name in fields})
    for name, (_, value) in changes(config).items():
        if value is None:
            continue
        if names is not None and name not in names:
            continue
        yield flags_of(fields[name])[0]
        if isinstance(value, list):
            yield from map(str, value)
        elif not isinstance(value, bool):
            yield str(value)


def command_line(state: Mapping[str, Any], root: str) -> list[str]:
    """Return the command line of a run that is about to compute the dumped step. root: the folder of the dumps."""
    settings = state["config"]
    step = state["bad_step"]

    # model and optimizer
    words = []
    for component in COMPONENTS_TAKEN:
        words += words_of(component, settings[component])
    for component, names in FIELDS_TAKEN.items():
        words += words_of(component, settings[component], names)
    scale = state["grad_scaler"].get("scale")
    if scale is not None:
        words += ["--initial-loss-scale", str(scale)]

    # one step on the dumped samples; the tokenizer and the data are only needed for their sizes
    words += ["--micro-batch-size", str(step["micro_batch_size"]), "--global-batch-size", str(step["samples"])]
    words += ["--train-iters", str(state["train"]["iteration"] + 1), "--lr", "0.001", "--eval-iters", "0"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(state["vocab_size"] - 1), "--mock-data"]

    # the weights
    words += ["--load", root, "--no-load-optim", "--allow-tokenizer-change"]
    if lost_buffers(state):  # the step is computed with the buffers' initial values, which a WARNING says
        words.append("--allow-lost-buffers")
    return words


def compare(step: Mapping[str, Any], figures: StepFigures) -> Iterator[str]:
    """Yield a line for each number of the step: whether the rerun gives the same bits. step: the run's numbers."""
    for name, text in exact_numbers(figures).items():
        rerun_value = float.fromhex(text)
        run_value = float.fromhex(step[name])
        both_nan = math.isnan(rerun_value) and math.isnan(run_value)
        if rerun_value == run_value or both_nan:
            verdict = "comes again, to the bit"
        else:
            can_divide = math.isfinite(run_value) and run_value != 0
            relative = abs(rerun_value - run_value) / abs(run_value) if can_divide else math.inf
            verdict = f"is another: {run_value!r} in the run, {relative:.1e} of it apart"
        yield f"{name:>7} {rerun_value!r} {verdict}"


def replay(root: str, model: str, further_flags: list[str]) -> None:
    """Rerun the step, compare its numbers with the run's, and print the first bad tensor. Every rank must call."""
    # open the dump
    try:
        checkpoint = open_checkpoint(Path(root))
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{root} holds no dump of a step: {error}; give the folder of --bad-step-dir") from None
    state = checkpoint.state
    step = state.get("bad_step")
    if step is None:
        raise ConfigError(
            f"{checkpoint.folder} is a checkpoint, and no dump of a step; give the folder of --bad-step-dir"
        )

    # build the run from the dump's settings
    script = script_at(model)
    samples = DumpedSamples(checkpoint, step["first_sample"])
    runtime = initialize_megatron(
        script.extra_args_provider,
        script.args_defaults,
        argv=[*command_line(state, root), *further_flags],
        rules=script.rules,
        **script.ranks_of,
    )
    try:
        trainer = Trainer(
            runtime, lambda sizes: (samples, None, None), script.model_provider, script.forward_step, script.group_of
        )
        data = trainer.training_data()
        num_microbatches = step["samples"] // runtime.samples_at_once
        work = StepWork(trainer.pipeline, trainer.optimizer, data, step["first_sample"], num_microbatches)
        for batches in data.values():
            if isinstance(batches, RewindableBatches):
                batches.begin()

        # rerun the step twice: for its numbers, then with a check of each tensor
        print_rank_0(f"iteration {state['train']['iteration'] + 1} of the run: {step['text']}")
        for line in compare(step, work.compute()):
            print_rank_0(line)
        print_rank_0(first_nonfinite_tensor(work, runtime.device.torch_device))
    finally:
        runtime.resources.close()
        set_runtime(None)


def main(arguments: list[str] | None = None) -> None:
    """Run the tool. Refused flags end every rank with status 2; the first rank prints the problems."""
    options, further_flags = make_parser().parse_known_args(arguments)
    try:
        replay(options.dump, options.model, further_flags)
    except ConfigError as error:
        if parallel_state.launched_rank() != 0:
            sys.exit(2)  # each rank has the same problem
        stop_with(error)
    finally:
        parallel_state.stop_distributed()


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
