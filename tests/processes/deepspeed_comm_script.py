"""Every function of deepspeed.comm on three ranks: rank r holds r + 1 times what rank 0 holds. The closed forms are written out."""

from enum import Enum

import torch
import torch.distributed as dist

from megatron.core import mpu
from megatron.core.parallel.global_state import get_mesh
from megatron.deepspeed import comm

comm.init_distributed("GLOO", verbose=False)
RANK, RANKS = comm.get_rank(), comm.get_world_size()
assert RANKS == 3 and comm.get_all_ranks_from_group() == [0, 1, 2] and comm.get_global_rank(None, 2) == 2
TWO = comm.new_group([0, 2])


def own(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64) * (RANK + 1)


def reductions() -> None:
    by_name = Enum("ReduceOp", "SUM PRODUCT MIN MAX AVG")  # as DeepSpeed's own: its numbers are not torch's
    for name, result in (("SUM", 12.0), ("PRODUCT", 48.0), ("MIN", 2.0), ("MAX", 6.0), ("AVG", 4.0)):
        for op in (getattr(dist.ReduceOp, name), getattr(comm.ReduceOp, name), name, name.lower(), by_name[name]):
            assert comm.all_reduce(own(2.0), op=op).item() == result, op
            assert comm.inference_all_reduce(own(2.0), op).item() == result, op
            part, parts = own(0.0), own(0.0)
            comm.reduce_scatter_tensor(part, own(1.0, 2.0, 3.0), op=op)
            comm.reduce_scatter(parts, [own(1.0), own(2.0), own(3.0)], op=op)
            comm.reduce(there := own(2.0), 2, op)
            of_three = [1 * (RANK + 1), 2 * (RANK + 1), 3 * (RANK + 1)]
            wanted = {"SUM": sum, "MIN": min, "MAX": max, "AVG": lambda x: sum(x) / 3}.get(
                name, lambda x: x[0] * x[1] * x[2]
            )
            assert part.item() == parts.item() == wanted(of_three), (op, part, parts)
            assert RANK != 2 or there.item() == result, (op, there)
    bits = torch.tensor([RANK + 1])  # 1, 2, 3
    for name, result in (("BAND", 0), ("BOR", 3), ("BXOR", 0)):
        assert comm.all_reduce(bits.clone(), op=name).item() == result
    assert comm.all_reduce(bits * 2, "mean").item() == 4
    comm.all_reduce_coalesced(several := [own(1.0), own(2.0)], "max")
    assert [x.item() for x in several] == [3.0, 6.0]
    handle = comm.all_reduce(late := own(1.0), "avg", async_op=True)
    handle.wait()
    assert late.item() == 2.0 and handle.is_completed()
    weight = torch.nn.Parameter(own(1.0))  # gloo's mean is a division in place, which autograd has no part in
    assert comm.all_reduce(weight, "avg").item() == 2.0
    comm.all_to_all(came := [torch.nn.Parameter(own(0.0)) for _ in range(3)], [own(1.0)] * 3)
    assert [x.item() for x in came] == [1.0, 2.0, 3.0]


def groups() -> None:
    assert comm.get_rank(TWO) == [0, -1, 1][RANK] and comm.get_world_size(TWO) == [2, -1, 2][RANK]
    assert comm.all_reduce(own(1.0), group=TWO).item() == [4.0, 2.0, 4.0][RANK]
    assert comm.all_reduce(own(1.0), "avg", comm.get_world_group()).item() == 2.0
    mpu.initialize_model_parallel()  # after a group of the script's own, which not every rank is in
    mesh = get_mesh()
    assert comm.all_reduce(own(1.0), "max", mesh["dp"]).item() == 3.0
    assert comm.all_reduce(own(1.0), "max", mesh["tp"]).item() == RANK + 1
    assert comm.get_all_ranks_from_group(mesh["dp"]) == [0, 1, 2] and comm.get_world_size(mesh["tp"]) == 1
    for wrong in ("all", [0, 1]):
        try:
            comm.all_reduce(own(1.0), group=wrong)
        except TypeError as error:
            assert "give a process group of torch's" in str(error)
        else:
            raise AssertionError(f"group={wrong!r} was taken")


def copies() -> None:
    assert comm.broadcast(own(1.0), 1).item() == 2.0
    comm.all_gather(each := [own(0.0) for _ in range(3)], own(1.0))
    assert [x.item() for x in each] == [1.0, 2.0, 3.0]
    comm.all_gather_into_tensor(out := torch.zeros(3, dtype=torch.float64), own(1.0))
    assert out.tolist() == [1.0, 2.0, 3.0]
    comm.all_gather_coalesced([out], [own(2.0)])
    assert out.tolist() == [2.0, 4.0, 6.0]
    comm.all_to_all_single(out, 10 * RANK + torch.arange(3.0, dtype=torch.float64))
    assert out.tolist() == [RANK, 10 + RANK, 20 + RANK]
    # Rank r sends j + 1 numbers to rank j, so receives r + 1 from each.
    sent = torch.cat([torch.full((j + 1,), 10.0 * RANK + j) for j in range(3)])
    came = torch.zeros(3 * (RANK + 1))
    comm.all_to_all_single(came, sent, [RANK + 1] * 3, [1, 2, 3])
    wanted = [float(10 * source + RANK) for source in range(3) for _ in range(RANK + 1)]
    assert came.tolist() == wanted
    lists = [torch.zeros(RANK + 1) for _ in range(3)]
    comm.all_to_all(lists, list(sent.split([1, 2, 3])))
    assert torch.cat(lists).tolist() == wanted
    comm.gather(own(1.0), each if RANK == 1 else None, dst=1)
    assert [x.item() for x in each] == [1.0, 2.0, 3.0]
    comm.scatter(mine := own(0.0), [own(7.0 * i) for i in range(3)] if RANK == 0 else None, src=0)
    assert mine.item() == 7.0 * RANK
    comm.all_gather_object(objects := [None] * 3, {"rank": RANK})
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    comm.broadcast_object_list(objects, 2)


def transfers() -> None:
    if RANK == 0:
        comm.send(own(5.0), 1)
        comm.isend(own(6.0), 1).wait()
    elif RANK == 1:
        assert comm.recv(first := own(0.0)) == 0
        comm.irecv(second := own(0.0), 0).wait()
        assert (first.item(), second.item()) == (5.0, 6.0)
    comm.barrier()
    comm.monitored_barrier()


for check in (reductions, groups, copies, transfers):
    check()
print("every call agrees", flush=True)
