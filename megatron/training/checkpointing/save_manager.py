"""The checkpoint manager saves a run: checkpoints, copies for restarts, Hugging Face folders.

Training waits for each of them, or with --async-save only for a copy of its state in host memory.
"""

import time
from collections.abc import Callable
from functools import partial

from megatron.core.base import rank_status
from megatron.core.dist_checkpointing.async_snapshot_to_writer_process import AsyncSaver, AsyncSaveResult
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.training.checkpointing import non_persistent_checkpoint, save_and_load_run_state
from megatron.training.checkpointing.hf_export import HFExports
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

_NOTABLE_WAIT = 0.001  # seconds


class SaveManager:
    """A manager saves one run. Every rank has one and makes the same calls, except `poll` and `close`.

    As a context around the training steps it first writes a Hugging Face folder that a killed run has not written, and
    at the end waits for the save in flight.

    state: of the run, at the step that is saved. note: called with each save that is on disk.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: save_and_load_run_state.Chunks,
        optimizer: FlatOptimizer,
        state: TrainState,
        note: Callable[[str], object],
    ):
        self._runtime = runtime
        self._chunks = chunks
        self._optimizer = optimizer
        self._state = state
        self._note = note
        self._async_saver: AsyncSaver | None = None
        self._exports = HFExports(runtime, chunks, state)
        config = runtime.config.checkpoint
        if config.save is None or not config.async_save:
            return
        world = runtime.mesh["world"]
        device = runtime.device.torch_device
        self._async_saver = AsyncSaver(world, device)
        runtime.resources.callback(self.close)
        # Allocate the memory for copies now: too little of it must not stop the run after hours, and no save waits for it.
        with collectives.raise_together(world, device):
            self._async_saver.reserve(save_and_load_run_state.tensors_to_save(runtime, chunks, optimizer))

    def due_actions(self, *, last: bool) -> list[Callable[[dict], None]]:
        """Return what to do after this step, in this order; call each with the log's state. last: the run ends."""
        config = self._runtime.config.checkpoint
        iteration = self._state.iteration
        actions: list[Callable[[dict], None]] = []
        is_due = config.save_interval is not None and iteration % config.save_interval == 0
        if config.save is not None and (is_due or last):
            actions.append(self.save)
        elif config.copy_is_due(iteration):
            actions.append(self.save_local_checkpoint)
        if self._exports.is_due(last=last):
            actions.append(partial(self._export, last=last))
        return actions

    def _export(self, log_state: dict, *, last: bool) -> None:
        if last:  # finish the checkpoint first: a scheduler that ends the job may not wait for the folder
            self.finish()
        self._exports.write()

    def export_if_missing(self, *, last: bool = True) -> None:
        """Write the Hugging Face folder of the present iteration if an earlier run was killed before it had written it.

        last: nothing is left to train.
        """
        if self._exports.is_missing(last=last):
            with rank_status.during("saving", then="training"):
                self._exports.write()

    def save(self, log_state: dict) -> None:
        """Save the state after this step.

        Raises CheckpointError if this save or, with --async-save, the previous one fails.
        """
        root = self._runtime.config.checkpoint.save
        iteration = self._state.iteration

        # while training waits
        if self._async_saver is None:
            save_and_load_run_state.save(self._runtime, self._chunks, self._optimizer, self._state, log_state)
            self._record(iteration)
            return

        # beside training: end the previous save, then copy the state and start this one
        start = time.monotonic()
        previous = self._async_saver.in_flight
        self.finish()
        waited = time.monotonic() - start
        if waited > _NOTABLE_WAIT and previous is not None:
            advice = "a save takes longer than the steps between two: raise --save-interval"
            print_rank_0(f"WARNING: waited {waited:.3f} s for the save of iteration {previous}; {advice}")
        contents = save_and_load_run_state.checkpoint_contents(
            self._runtime, self._chunks, self._optimizer, self._state, log_state
        )
        stall = self._async_saver.start(root, iteration, *contents)
        print_rank_0(
            f"saving checkpoint of iteration {iteration} beside training, which waited {stall:.3f} s for the copy"
        )

    def save_local_checkpoint(self, log_state: dict) -> None:
        """Write the copy for restarts while training waits. If it fails, a WARNING says so and training continues."""
        config = self._runtime.config.checkpoint
        world = self._runtime.mesh["world"]
        iteration = self._state.iteration
        contents = save_and_load_run_state.checkpoint_contents(
            self._runtime, self._chunks, self._optimizer, self._state, log_state
        )
        start = time.monotonic()
        try:
            non_persistent_checkpoint.save_local_checkpoint(
                config, iteration, *contents, world, self._runtime.device.torch_device
            )
        except collectives.LostPeerError:
            raise
        except (CheckpointError, collectives.PeerError, OSError) as error:
            print_rank_0(f"WARNING: no copy of iteration {iteration}: {error}")
        else:
            kind = config.non_persistent_ckpt_type
            print_rank_0(f"{kind} copy of iteration {iteration} for restarts: {time.monotonic() - start:.3f} s")

    def __enter__(self) -> "SaveManager":
        self.export_if_missing(last=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with rank_status.during("saving", then="training"):
            if kind is None:
                self.finish()
            self.close()

    def poll(self) -> None:
        """Report a save that has ended beside training. Raises its error if it failed. Costs one system call."""
        if self._async_saver is not None:
            self._report(self._async_saver.poll())

    def finish(self) -> None:
        """Wait for the save in flight. Raises its error if it failed."""
        if self._async_saver is not None:
            self._report(self._async_saver.finish())

    def close(self) -> None:
        """Wait for the save in flight, at the end of a run that may have failed.

        An error of the save is only printed.
        """
        if self._async_saver is None:
            return
        try:
            self._report(self._async_saver.finish_own_part())
        except (CheckpointError, collectives.PeerError) as error:
            print_rank_0(f"WARNING: {error}")
        self._async_saver.close()
        self._async_saver = None

    def _report(self, result: AsyncSaveResult | None) -> None:
        if result is None:
            return
        for problem in result.warnings:
            print_rank_0(f"WARNING: {problem}")
        saved = f"saved checkpoint at iteration {result.iteration} to {result.root}"
        print_rank_0(f"{saved}, beside training: on disk after {result.durable:.1f} s")
        self._record(result.iteration)

    def _record(self, iteration: int) -> None:
        """Record that an iteration is on disk; older checkpoints may be deleted now."""
        save_and_load_run_state.record_save(self._runtime, self._state, iteration)
        self._note(f"Saved checkpoint\tIteration: {iteration}")
