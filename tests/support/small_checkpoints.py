"""Small checkpoints, saved and loaded by one rank or by ranks that are threads."""

import torch
from local_ranks import run_ranks
from said import raises_telling

from megatron.core.dist_checkpointing import CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import whole


def tried_by_ranks(size, work):
    """`work(world)` on every rank; the results, with an exception as the result of the rank that raised it."""

    def attempt(mesh):
        try:
            return work(mesh["world"])
        except Exception as error:
            return error

    return run_ranks({"dp": size}, attempt)


def good(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def refused(said):
    """said: what the error names, as `tells` takes it."""
    return raises_telling(CheckpointError, said)


def one(tensor):
    """A tensor that one rank holds whole."""
    return LocalTensor(tensor, tuple(tensor.shape), [(whole(tensor.shape), whole(tensor.shape))], True)


def save_one(root, iteration=1, state=None, **tensors):
    tensors = tensors or {"w": torch.arange(12.0).view(3, 4)}
    return save_checkpoint(root, iteration, {name: one(x) for name, x in tensors.items()}, state or {}, ALONE)


def loaded(root, iteration=None, name="w", shape=(3, 4)):
    target = one(torch.zeros(shape))
    open_checkpoint(root, iteration).read_into({name: target})
    return target.tensor
