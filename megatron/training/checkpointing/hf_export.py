"""--save-hf: the run's model as Hugging Face folders, written by the ranks as they train.

    SAVE_HF/iter_0000100/             complete: a folder gets this name only then
    SAVE_HF/iter_0000100.partial/     being written; the next run removes it
    SAVE_HF/iter_0000100.replaced/    complete: the folder of iteration 100 before, while the new one takes its name

What stands in the way of an export, an option that the family cannot say or a folder that is no place for one, refuses
the run at
its start, and not after hours.
"""

import re
import time
from pathlib import Path

import torch

from megatron.convert.export_distributed import records_of_ranks, write_gathered
from megatron.convert.export_plan import plan_folder
from megatron.convert.formats.read_hf_folder import is_hf_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry import FUNCTIONS
from megatron.core.dist_checkpointing.checkpoint_folder import remove
from megatron.core.dist_checkpointing.format import PARTIAL, REPLACED, CheckpointError, folder_name, iteration_of
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.checkpoint_tensors import sharded_model_state
from megatron.core.parallel import collectives
from megatron.core.storage import file_layer
from megatron.core.storage.paths import path_of
from megatron.training.checkpointing.model_name import model_name
from megatron.training.checkpointing.registry_compatibility import functions_of
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

_LEFT = re.compile(r"iter_[0-9]{7,}(\.[0-9]+)?(\.partial|\.replaced)")  # what a killed run leaves


class HFExports:
    """Every rank has one and makes the same calls. Raises ConfigError at once if the model cannot be written."""

    def __init__(self, runtime: Runtime, chunks: list[DistributedDataParallel], state: TrainState):
        self._runtime, self._chunks = runtime, chunks
        self._state, self._told = state, set()
        self._config = config = runtime.config.hf
        if config.save_hf is None:
            return
        world, device = runtime.mesh["world"], runtime.device.torch_device
        name = model_name([chunk.module for chunk in chunks], runtime.mesh["pp"], device)
        settings = {"config": runtime.config.as_json(), "model": name, "vocab_size": runtime.vocab_size_if_any}
        settings |= {FUNCTIONS: functions_of(runtime.config)}
        origin = {} if state.origin is None else {"origin": state.origin.as_json()}
        records = records_of_ranks(sharded_model_state(chunks, runtime.mesh), world, device)
        options = {"dtype": config.save_hf_dtype, "most_bytes": config.most_bytes}
        with collectives.raise_together(world, device):
            try:
                self._plan = plan_folder(settings | origin, records, "this run", **options)
            except ConfigError as error:
                raise ConfigError([f"--save-hf: {problem}" for problem in error.problems]) from error

    def is_due(self, *, last: bool) -> bool:
        """Whether a folder follows the step that was done. last: the run ends with it."""
        return self._config.is_due(self._state.iteration, last=last)

    def is_missing(self, *, last: bool) -> bool:
        """Whether the iteration that is done should have a folder and has none, as where a run was killed while it
        wrote it."""
        return self._state.iteration > 0 and self.is_due(last=last) and not self._is_there()

    def _is_there(self) -> bool:
        world, device = self._runtime.mesh["world"], self._runtime.device.torch_device
        found = int(world.is_first and is_hf_folder(self._folder))
        return bool(collectives.broadcast(torch.tensor([found], device=device), world).item())

    @property
    def _folder(self) -> Path:
        return path_of(self._config.save_hf) / folder_name(self._state.iteration)

    def write(self) -> None:
        """Write the folder of this step, while training waits. Every rank must call; if one fails, all raise."""
        mesh, device = self._runtime.mesh, self._runtime.device.torch_device
        world, began = mesh["world"], time.monotonic()
        final = self._folder
        partial = final.with_name(final.name + PARTIAL)
        for chunk in self._chunks:
            chunk.finish_param_gather()
        try:
            with collectives.raise_together(world, device):
                if world.is_first:
                    remove(partial)
            write_gathered(self._plan, sharded_model_state(self._chunks, mesh), partial, world, device, note=self._tell)
            with collectives.raise_together(world, device):
                if world.is_first:
                    _publish(partial, final)
        except OSError as error:
            raise CheckpointError(
                final, f"cannot be written ({error})", "what is there of it is removed by the next run"
            ) from error
        seconds = time.monotonic() - began
        print_rank_0(f"wrote {final} as a {self._plan.kind} of Hugging Face form: {seconds:.3f} s")

    def _tell(self, line: str) -> None:
        """Once in a run."""
        if line not in self._told:
            print_rank_0(f"--save-hf: {line}")
        self._told.add(line)


def _publish(partial: Path, final: Path) -> None:
    """Give a complete folder its name. A previous one of the same iteration goes; a kill at any point leaves one of the two.
    A link in its place goes, and not what it leads to."""
    on, aside = file_layer.at(final), final.with_name(final.name + REPLACED)
    if file_layer.exists(final):
        on.rename(final, aside)
    on.rename(partial, final)
    on.sync_folder(final.parent)
    remove(aside)


# ---------------------------------------------------------------- at the start


def check_contents(root: Path) -> None:
    """Refuse a folder that holds anything but such folders: it is another's, or another thing's. For one rank."""
    others = []
    for name in file_layer.at(root).names(root):
        is_whole = iteration_of(name) is not None and is_hf_folder(root / name)
        others += [] if is_whole or _LEFT.fullmatch(name) else [name]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"--save-hf {root} holds {', '.join(others[:3])}{more}, which --save-hf has not written; give a folder of its own"
        )


def clear_partial(root: Path) -> None:
    """Remove what a killed run has left, and give the folder that it was replacing its name back. For one rank."""
    for name in file_layer.at(root).names(root):
        final = root / name.removesuffix(PARTIAL).removesuffix(REPLACED)
        if name.endswith(REPLACED) and not file_layer.exists(final):
            file_layer.at(root).rename(root / name, final)
        elif _LEFT.fullmatch(name):
            remove(root / name)
