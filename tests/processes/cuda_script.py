"""A script that is written for a cluster: it asks torch.cuda and NCCL for everything. Run by `megatron.on_cpu`."""

import copy
import os
import pickle
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import _lazy_call, current_device, device as device_context  # noqa: F401
from torch.utils.checkpoint import checkpoint

rank = int(os.environ["RANK"])


def is_on_cpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def groups() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = dist.new_group([0, 1], backend="nccl", pg_options=dist.ProcessGroupNCCL.Options())
    x = torch.ones(4, device="cuda") * (rank + 1)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    dist.barrier(device_ids=[rank])
    shard = torch.zeros(2, device=current_device())
    dist.reduce_scatter_tensor(shard, x, op=dist.ReduceOp.AVG)
    assert x[0] == shard[0] == 1.5
    assert dist.is_nccl_available() and dist.device_mesh.init_device_mesh("cuda", (2,)).size() == 2
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[rank], output_device=rank)
    wrapped(torch.ones(1, 2).cuda()).sum().backward()


def tensors() -> torch.Tensor:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.device(rank):
        a = torch.randn(3, 3, device=torch.device("cuda", rank))
    torch.cuda.current_stream().wait_stream(stream)
    a.record_stream(stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert 0 <= start.elapsed_time(end) < 1000 and end.query() and stream.query()
    assert torch.cuda.max_memory_allocated() > 1 << 20 < torch.cuda.memory_allocated(rank)
    assert torch.cuda.memory_stats()["num_ooms"] == 0 < torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.mem_get_info()[1] and torch.cuda.get_device_capability() >= (8, 0)
    torch.cuda.empty_cache()

    moved = torch.ones(2).pin_memory().to(device="cuda:0", non_blocking=True, dtype=torch.float64).cuda(0).to(rank)
    assert moved.dtype == torch.float64 == moved.to(a.double()).dtype and moved.half().to(torch.int).dtype == torch.int
    assert torch.cuda.LongTensor([1]).dtype == torch.int64 == moved.type("torch.cuda.LongTensor").dtype
    assert moved.type(torch.cuda.HalfTensor).type() == "torch.HalfTensor"
    device = torch.device(torch.cuda.current_device())
    assert isinstance(device, torch.device) and (device.type, device.index) == ("cuda", rank)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    with torch.device("cuda"):
        assert is_on_cpu(torch.zeros(2), torch.empty(2, pin_memory=True), a.new_zeros(2, device=device))
    with tempfile.TemporaryFile() as file:
        torch.save(moved, file)
        for place in ("cuda:0", device, lambda storage, _: storage.cuda(0), {"cuda:0": "cuda:1"}):
            file.seek(0)
            assert torch.equal(torch.load(file, map_location=place), moved)
    return a


def random_numbers() -> None:
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3).cuda())
    _lazy_call(lambda: torch.cuda.default_generators[rank].set_state(state))
    assert torch.equal(drawn, torch.rand(3).cuda())
    generator = torch.Generator(device="cuda")
    torch.rand(2, generator=generator.manual_seed(1), device="cuda")
    torch.cuda.manual_seed(1)
    torch.cuda.manual_seed_all(1)


@torch.jit.script
def scripted(x):
    return x + torch.zeros(3)


def products(a: torch.Tensor) -> None:
    layer = nn.Linear(3, 3, device="cuda").to("cuda")
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert layer(a).dtype == torch.bfloat16
    with torch.autocast("cuda"):
        assert layer(a).dtype == torch.float16
    scaler, optimizer = torch.cuda.amp.GradScaler(), torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.cuda.nvtx.range("step"):
        scaler.scale(layer(a).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.nvtx.range_push("more")
    torch.cuda.profiler.start()
    torch.cuda.cudart().cudaProfilerStop()
    torch.cuda.nvtx.range_pop()
    for reentrant in (False, True):
        checkpoint(nn.functional.dropout, a.requires_grad_(), use_reentrant=reentrant).sum().backward()
    doubled = torch.compile(lambda x: x + torch.ones(3, device="cuda"), backend="eager")
    assert torch.equal(doubled(a), scripted(a) + 1)


assert __name__ == "__main__" and sys.modules["__main__"].rank == rank
assert sys.argv[1:] == ["--flag", "value"] and sys.path[0] == os.path.dirname(os.path.realpath(__file__))
assert torch.cuda.is_available() and torch.cuda.is_bf16_supported()
torch.cuda.set_device(rank % torch.cuda.device_count())
groups()
products(tensors())
random_numbers()
dist.destroy_process_group()
if rank:
    sys.exit(7)
raise ValueError("the end of the script")
