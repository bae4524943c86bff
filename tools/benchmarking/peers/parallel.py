"""Plain models on several ranks by torch's own means: the peers of --parallel."""

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
    """Data parallel, gradients in buckets that are views."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fully_sharded(model: PlainModel, work: Work, half: bool) -> nn.Module:
    """Each block gives up its parameters after its forward, the default. half: they are gathered in bfloat16, gradients summed in
    float32, as ours."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks.values():
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def tensor_parallel(model: PlainModel, work: Work, half: bool) -> nn.Module:
    """Column and row parallel products, a table sharded by words, and scores that stay sharded for the loss."""
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


def sums_gradients(wrapped: nn.Module, now: bool) -> None:
    """Whether the next backward sums gradients over the replicas: the last microbatch of a step does."""
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        wrapped.require_backward_grad_sync = now
    elif isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(now)


WRAPPED: dict[str, Callable[[PlainModel, Work, bool], nn.Module]] = {
    "dp": replicated,
    "zero3": fully_sharded,
    "tp": tensor_parallel,
}
