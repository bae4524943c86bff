"""What a run writes: checkpoints, while training waits or, with --async-save, beside it; copies; folders of Hugging
Face form."""

import time
from collections.abc import Callable
from functools import partial

from megatron.core.base import rank_status
from megatron.core.dist_checkpointing.async_save import BackgroundSaves, SavedInBackground
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.training.checkpointing import non_persistent_checkpoint, save_and_load
from megatron.training.checkpointing.hf_export import HFExports
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime, print_rank_0


class Saves:
    """Every rank has one, and makes the same calls, but for `poll` and `close`. As a context, around the steps, it
    begins with a folder that an earlier run has left out, and ends with the save in flight.

    state: of the run, at the step that is saved. note: told of each save that is on disk.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: save_and_load.Chunks,
        optimizer: FlatOptimizer,
        state: TrainState,
        note: Callable[[str], object],
    ):
        self._runtime, self._state = runtime, state
        self._note = note
        self._chunks, self._optimizer = chunks, optimizer
        self._background: BackgroundSaves | None = None
        self._exports = HFExports(runtime, chunks, state)
        config = runtime.config.checkpoint
        if config.save is None or not config.async_save:
            return
        world, device = runtime.mesh["world"], runtime.device.torch_device
        self._background = BackgroundSaves(world, device)
        runtime.held.callback(self.close)
        with collectives.raise_together(world, device):  # now, not after hours, and no save waits for it
            self._background.reserve(save_and_load.tensors_to_save(runtime, chunks, optimizer))

    def are_due(self, *, last: bool) -> list[Callable[[dict], None]]:
        """What follows the step that was done, in this order; each is to be called with the log's state. last: the
        run ends."""
        config, iteration = self._runtime.config.checkpoint, self._state.iteration
        due = config.save_interval is not None and iteration % config.save_interval == 0
        found: list[Callable[[dict], None]] = []
        if config.save is not None and (due or last):
            found.append(self.save)
        elif config.copy_is_due(iteration):
            found.append(self.save_copy)
        if self._exports.is_due(last=last):
            found.append(partial(self._export, last=last))
        return found

    def _export(self, log_state: dict, *, last: bool) -> None:
        if last:  # the checkpoint comes first: a scheduler may not wait for the folder
            self.finish()
        self._exports.write()

    def export_if_missing(self, *, last: bool = True) -> None:
        """Write the folder of an iteration that was done by an earlier run, if that run was killed before it was
        written. last:
        nothing is left to train."""
        if self._exports.is_missing(last=last):
            with rank_status.during("saving", then="training"):
                self._exports.write()

    def save(self, log_state: dict) -> None:
        """Save the state after this step. Raises CheckpointError if this save fails or, with --async-save, the one
        before."""
        root, iteration = self._runtime.config.checkpoint.save, self._state.iteration
        if self._background is None:
            save_and_load.save(self._runtime, self._chunks, self._optimizer, self._state, log_state)
            self._saved(iteration)
            return
        began, before = time.monotonic(), self._background.in_flight
        self.finish()
        if (waited := time.monotonic() - began) > 0.001 and before is not None:
            advice = "a save takes longer than the steps between two: raise --save-interval"
            print_rank_0(f"WARNING: waited {waited:.3f} s for the save of iteration {before}; {advice}")
        saving = save_and_load.to_save(self._runtime, self._chunks, self._optimizer, self._state, log_state)
        stall = self._background.start(root, iteration, *saving)
        print_rank_0(
            f"saving checkpoint of iteration {iteration} beside training, which waited {stall:.3f} s for the copy"
        )

    def save_copy(self, log_state: dict) -> None:
        """Write the copy for restarts while training waits. A copy that fails is told of, and the run goes on."""
        config, world = self._runtime.config.checkpoint, self._runtime.mesh["world"]
        saving = save_and_load.to_save(self._runtime, self._chunks, self._optimizer, self._state, log_state)
        began, iteration = time.monotonic(), self._state.iteration
        try:
            non_persistent_checkpoint.save_copy(config, iteration, *saving, world, self._runtime.device.torch_device)
        except collectives.LostPeerError:
            raise
        except (CheckpointError, collectives.PeerError, OSError) as error:
            print_rank_0(f"WARNING: no copy of iteration {iteration}: {error}")
        else:
            kind = config.non_persistent_ckpt_type
            print_rank_0(f"{kind} copy of iteration {iteration} for restarts: {time.monotonic() - began:.3f} s")

    def __enter__(self) -> "Saves":
        self.export_if_missing(last=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with rank_status.during("saving", then="training"):
            if kind is None:
                self.finish()
            self.close()

    def _saved(self, iteration: int) -> None:
        save_and_load.note_saved(self._runtime, self._state, iteration)
        self._note(f"Saved checkpoint\tIteration: {iteration}")

    def poll(self) -> None:
        """Report a save that has ended beside training; raises its error if it failed. Costs a question to the system."""
        if self._background is not None:
            self._report(self._background.poll())

    def finish(self) -> None:
        """Wait for the save in flight, and raise its error if it failed."""
        if self._background is not None:
            self._report(self._background.finish())

    def close(self) -> None:
        """Wait for the save in flight, at the end of a run that may have failed. A save that fails too is only told of."""
        if self._background is None:
            return
        try:
            self._report(self._background.land())
        except (CheckpointError, collectives.PeerError) as error:
            print_rank_0(f"WARNING: {error}")
        self._background.close()
        self._background = None

    def _report(self, saved: SavedInBackground | None) -> None:
        if saved is None:
            return
        for problem in saved.warnings:
            print_rank_0(f"WARNING: {problem}")
        where = f"saved checkpoint at iteration {saved.iteration} to {saved.root}"
        print_rank_0(f"{where}, beside training: on disk after {saved.durable:.1f} s")
        self._saved(saved.iteration)
