"""--save-hf: the run's model as Hugging Face folders, which the ranks write while training waits.

    SAVE_HF/iter_0000100/             complete: a folder gets this name only then
    SAVE_HF/iter_0000100.partial/     being written; the next run removes it
    SAVE_HF/iter_0000100.replaced/    complete: the previous folder of iteration 100, while the new one gets its name

A run whose model cannot be exported (an option that the family's config.json lacks, a folder with other files) is
refused at its start, not after hours.
"""

import re
import time
from pathlib import Path

import torch

from megatron.convert.formats.hf_config_and_safetensors_headers import has_hf_config
from megatron.convert.gather_ranks_to_hf_folder import gather_tensor_records, write_hf_folder_from_ranks
from megatron.convert.plan_hf_folder import plan_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.dist_checkpointing.checkpoint_folder import remove
from megatron.core.dist_checkpointing.manifest_format import (
    PARTIAL,
    REPLACED,
    CheckpointError,
    folder_name,
    iteration_of,
)
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state
from megatron.core.parallel import collectives
from megatron.core.storage import file_layer
from megatron.core.storage.path_or_url import path_of
from megatron.training.checkpointing.compare_registry_functions_on_resume import functions_of
from megatron.training.checkpointing.model_class_and_custom_modules import model_name
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

_LEFTOVER = re.compile(r"iter_[0-9]{7,}(\.[0-9]+)?(\.partial|\.replaced)")  # leftovers of a killed run


class HFExports:
    """The Hugging Face folders of a run. Every rank has one and makes the same calls.

    Making it raises ConfigError if the model cannot be exported.
    """

    def __init__(self, runtime: Runtime, chunks: list[DistributedDataParallel], state: TrainState):
        self._runtime = runtime
        self._chunks = chunks
        self._state = state
        self._printed: set[str] = set()
        self._config = config = runtime.config.hf
        if config.save_hf is None:
            return
        world = runtime.mesh["world"]
        device = runtime.device.torch_device

        # the state of a checkpoint of this run, as far as an export needs it
        name = model_name([chunk.module for chunk in chunks], runtime.mesh["pp"], device)
        state_of_run = {"config": runtime.config.as_json(), "model": name, "vocab_size": runtime.vocab_size_if_any}
        state_of_run[FUNCTIONS] = functions_of(runtime.config)
        state_of_run["tokenizer_sha256"] = runtime.tokenizer_sha256
        if state.origin is not None:
            state_of_run["origin"] = state.origin.as_json()

        # plan the folder, which checks everything that can be checked without values
        records = gather_tensor_records(sharded_model_state(chunks, runtime.mesh), world, device)
        options = {"dtype": config.save_hf_dtype, "most_bytes": config.most_bytes}
        with collectives.raise_together(world, device):
            try:
                self._plan = plan_folder(state_of_run, records, "this run", **options)
            except ConfigError as error:
                raise ConfigError([f"--save-hf: {problem}" for problem in error.problems]) from error

    def is_due(self, *, last: bool) -> bool:
        """Return whether a folder is to be written after this step. last: the run ends with it."""
        return self._config.is_due(self._state.iteration, last=last)

    def is_missing(self, *, last: bool) -> bool:
        """Return whether the present iteration should have a folder but has none.

        A run was killed then, before the folder was complete.

        Every rank must call.
        """
        return self._state.iteration > 0 and self.is_due(last=last) and not self._exists()

    def _exists(self) -> bool:
        world = self._runtime.mesh["world"]
        device = self._runtime.device.torch_device
        exists = int(world.is_first and has_hf_config(self._folder))
        return bool(collectives.broadcast(torch.tensor([exists], device=device), world).item())

    @property
    def _folder(self) -> Path:
        return path_of(self._config.save_hf) / folder_name(self._state.iteration)

    def write(self) -> None:
        """Write the folder of this step, while training waits. Every rank must call; if one fails, all raise."""
        start = time.monotonic()
        mesh = self._runtime.mesh
        world = mesh["world"]
        device = self._runtime.device.torch_device
        final = self._folder
        partial = final.with_name(final.name + PARTIAL)
        for chunk in self._chunks:
            chunk.finish_param_gather()
        try:
            with collectives.raise_together(world, device):
                if world.is_first:
                    remove(partial)
            tensors = sharded_model_state(self._chunks, mesh)
            write_hf_folder_from_ranks(self._plan, tensors, partial, world, device, note=self._print_once)
            with collectives.raise_together(world, device):
                if world.is_first:
                    _publish(partial, final)
        except OSError as error:
            raise CheckpointError(
                final, f"cannot be written ({error})", "what is there of it is removed by the next run"
            ) from error
        seconds = time.monotonic() - start
        print_rank_0(f"wrote {final} as a {self._plan.kind} of Hugging Face form: {seconds:.3f} s")

    def _print_once(self, line: str) -> None:
        """Print a line once in a run."""
        if line not in self._printed:
            print_rank_0(f"--save-hf: {line}")
        self._printed.add(line)


def _publish(partial: Path, final: Path) -> None:
    """Give a complete folder its name and remove the previous one of the same iteration.

    A kill at any point leaves one of the two. If the name is a link, the link is removed and not what it points to.
    """
    backend = file_layer.backend_of(final)
    replaced = final.with_name(final.name + REPLACED)
    if file_layer.exists(final):
        backend.rename(final, replaced)
    backend.rename(partial, final)
    backend.sync_folder(final.parent)
    remove(replaced)


# ---------------------------------------------------------------- at the start


def refuse_foreign_files(root: Path) -> None:
    """Refuse a folder that holds anything but exports of this run. Call on one rank. Raises ConfigError."""
    others = []
    for name in file_layer.backend_of(root).names(root):
        is_export = iteration_of(name) is not None and has_hf_config(root / name)
        if not is_export and not _LEFTOVER.fullmatch(name):
            others.append(name)
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"--save-hf {root} contains {', '.join(others[:3])}{more}, which --save-hf did not write; give a folder "
            "of its own"
        )


def clean_up_killed_export(root: Path) -> None:
    """Remove the leftovers of a killed run, and give the folder that it was replacing its name back.

    Call on one rank.
    """
    backend = file_layer.backend_of(root)
    for name in backend.names(root):
        final = root / name.removesuffix(PARTIAL).removesuffix(REPLACED)
        if name.endswith(REPLACED) and not file_layer.exists(final):
            backend.rename(root / name, final)
        elif _LEFTOVER.fullmatch(name):
            remove(root / name)
