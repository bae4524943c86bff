"""Activation recomputation: the backward computes activations again instead of saving them, to the same bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.offload.activation_offload import Keep
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.ops.torch_function_overrides import determinism_check
from megatron.core.parallel.grid import Axis
from megatron.core.storage.resize_storage import resize
from megatron.core.tensor_parallel.saved_activations import SavedActivation, keep_copy


def recomputed(
    run: Callable[..., Tensor],
    keys: DropoutKeys,
    *inputs: Any,
    parts_over: Axis | None = None,
    keep: Keep | None = None,
) -> Tensor:
    """run(*inputs), saving only the inputs for the backward.

    parts_over: ranks with equal copies of the first input; each saves a shard, and the backward gathers them. keep:
    stores the first input, or the shard.

    Dropout masks follow from their keys, so no generator state is saved: recomputation uses the sample numbers of the
    forward. It stops once the backward has what it needs, which skips the last reduction of the last layer.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    samples = keys.samples
    axis, take = parts_over if parts_over is not None and parts_over.size > 1 else None, None
    if axis is not None or keep is not None:
        take, inputs = SavedActivation(inputs[0], axis, keep or keep_copy).take, inputs[1:]

    def run_as_before(*again: Any) -> Tensor:
        with keys.naming(samples):
            return run(*again) if take is None else run(take(), *again)

    return checkpoint(
        run_as_before, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check=determinism_check()
    )


def give_up(x: Tensor, again: Callable[[], Tensor], *, until: Tensor) -> None:
    """Free the memory of `x`. Before the backward of `until`, its only remaining reader, `again()` recomputes the
    values."""
    memory = x.untyped_storage()
    size, held = memory.nbytes(), [(x, again)]

    def fill(_: Tensor) -> None:
        x, again = held.pop()  # the hook outlives this call; without pop it would keep both alive
        resize(x.untyped_storage(), size)
        with torch.no_grad():
            x.data.copy_(again())  # `.data`, since a copy into x would raise its version counter, which autograd checks

    until.register_hook(fill)
    resize(memory, 0)
