"""Small checkpoints, saved and loaded by one rank or by ranks that are threads."""

import threading

import torch
from said import raises_telling

from megatron.core import comm
from megatron.core.boxes import whole
from megatron.core.checkpoint import CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.grid import ALONE, Axis


class ThreadGroup:
    """The two calls that saving and loading make, between threads that take turns at a barrier."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def _meet(self, x):
        self.slots[self.rank] = x.clone()
        self.barrier.wait(timeout=5)
        gathered = list(self.slots)
        self.barrier.wait(timeout=5)
        return gathered

    def all_reduce(self, x, op):
        stacked = torch.stack(self._meet(x))
        x.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return self

    def broadcast(self, x, source):
        x.copy_(self._meet(x)[source])
        return self

    def wait(self): ...


def run_ranks(size, work):
    """`work(world)` on every rank; the results, with an exception as the result of the rank that raised it."""
    slots, barrier, results = [None] * size, threading.Barrier(size), [None] * size

    def run(rank):
        world = Axis("world", tuple(range(size)), rank, ThreadGroup(rank, slots, barrier), comm.Ledger())
        try:
            results[rank] = work(world)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


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
