"""From the gradients of one step's microbatches to the gradient of its mean loss, the same in every layout."""

from collections.abc import Sequence

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel


def finalize_grads(chunks: Sequence[DistributedDataParallel], tokens: float, loss_scale: float = 1.0) -> None:
    """Wait for the sums over the ranks, then divide once by the number of tokens of the whole step, and by what the losses
    were multiplied with.

    Gradients were accumulated as sums over tokens, so no layout, and no uneven loss mask, changes what they mean.
    Every rank must call, after the last backward and REDUCE of all its chunks.
    """
    for chunk in chunks:
        chunk.finish_grad_reduce()
        chunk.scale_grads(1.0 / (max(tokens, 1.0) * loss_scale))
