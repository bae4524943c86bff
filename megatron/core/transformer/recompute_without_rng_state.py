"""Activation recomputation: the backward computes activations again instead of saving them, to the same bits."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.offload.activation_offload import InputSaver
from megatron.core.ops.decisions_overridable_for_memory_prediction import checkpoint_determinism_check
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.buffer_placement_and_sync import buffer_values, persistent_buffers, with_buffer_values
from megatron.core.storage.resize_storage import resize_and_notify
from megatron.core.tensor_parallel.distribute_saved_activations_over_tp import SavedActivation, keep_clone


def recompute_in_backward(
    run: Callable[..., Tensor],
    keys: SampleDropoutKeys,
    *inputs: Any,
    shard_over: Axis | None = None,
    keep: InputSaver | None = None,
    modules: Iterable[nn.Module] = (),
) -> Tensor:
    """Return run(*inputs), saving only the inputs; the backward runs it again (torch calls this checkpointing).

    inputs: tensors of any shapes, and other objects. shard_over: ranks with equal copies of the first input; each saves
    a shard [numel / t], and the backward gathers them, so all must call. keep: stores the first input, or this rank's
    shard of it. modules: those that `run` uses. The recomputation sees the values that their persistent buffers had in the
    forward, and what it changes in them is dropped.

    Dropout masks follow from their keys, so no generator state is saved: recomputation uses the sample numbers of the
    forward. It stops once the backward has what it needs, which skips the last reduction of the last layer.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    samples = keys.samples
    buffers = [buffer for module in modules for buffer in persistent_buffers(module)]
    values_in_forward = buffer_values(buffers)
    is_recomputation = False
    choices: list[Any] = []  # of the forward, which the recomputation makes alike
    axis = shard_over if shard_over is not None and shard_over.size > 1 else None
    take_first_input = None
    if axis is not None or keep is not None:
        take_first_input = SavedActivation(inputs[0], axis, keep or keep_clone).take
        inputs = inputs[1:]

    def run_with_forward_masks(*saved_inputs: Any) -> Tensor:
        nonlocal is_recomputation
        as_in_forward = with_buffer_values(buffers, values_in_forward) if is_recomputation else nullcontext()
        with_choices = keys.choices.running(choices, is_recomputation=is_recomputation)
        is_recomputation = True
        with keys.naming(samples), as_in_forward, with_choices:
            if take_first_input is None:
                return run(*saved_inputs)
            return run(take_first_input(), *saved_inputs)

    return checkpoint(
        run_with_forward_masks,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check=checkpoint_determinism_check(),
    )


def discard_and_recompute(x: Tensor, recompute: Callable[[], Tensor], *, until: Tensor) -> None:
    """Free the memory of `x` now; just before the backward of `until`, its last reader, `recompute()` fills it again.

    x and until: of any shapes; recompute() returns a tensor of x's shape. Megatron's
    `CheckpointWithoutOutput.discard_output_and_register_recompute` does the same.
    """
    storage = x.untyped_storage()
    size = storage.nbytes()
    pending = [(x, recompute)]

    def fill(_: Tensor) -> None:
        x, recompute = pending.pop()  # the hook outlives this call; without pop it would keep both alive
        resize_and_notify(x.untyped_storage(), size)
        with torch.no_grad():
            x.data.copy_(
                recompute()
            )  # `.data`, since a copy into x would raise its version counter, which autograd checks

    until.register_hook(fill)
    resize_and_notify(storage, 0)
