"""Wrap plain models for several ranks with torch's own parallelism: the peers of --parallel."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tools.benchmarking.peers.plain import PlainModel
from tools.benchmarking.work import Work


def replicated(model: PlainModel, work: Work, half: bool) -> nn.Module:
    """Wrap a model for data parallelism. Gradients are views of the buckets, which saves a copy."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fully_sharded(model: PlainModel, work: Work, half: bool) -> nn.Module:
    """Shard a model by fully_shard. Each block frees its full parameters after its forward, which is the default.

    half: parameters are gathered in bfloat16, and gradients summed in float32, as in ours.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks.values():
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def tensor_parallel(model: PlainModel, work: Work, half: bool) -> nn.Module:
    """Shard a model by DTensor: column- and row-parallel matrices, vocabulary-parallel embedding and logits."""
    mesh = dist.init_device_mesh(next(model.parameters()).device.type, (work.ranks,))
    plan = {"attention.qkv.*": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"mlp.up.*": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    scores = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"words": words, "scores": scores})
    model.tie()
    return model


def set_gradient_sync(wrapped: nn.Module, is_last_microbatch: bool) -> None:
    """Let the next backward sum gradients over the replicas if it is the last of a step."""
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        wrapped.require_backward_grad_sync = is_last_microbatch
    elif isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(is_last_microbatch)


WRAPPED: dict[str, Callable[[PlainModel, Work, bool], nn.Module]] = {
    "dp": replicated,
    "zero3": fully_sharded,
    "tp": tensor_parallel,
}
