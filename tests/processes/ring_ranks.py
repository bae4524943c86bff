"""What one rank of test_context_processes.py does: attention over the ranks of the job, by us and by torch, compared on the spot.

Causal, without dropout.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from benchmarks.context_speed import of_torch

from megatron.core import parallel_state
from megatron.core.context_parallel.cp_attention import METHODS, AttentionInputs, ContextParallel
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
from megatron.core.ops.shard_sequence import shard_sequence
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis

SAMPLES, HEADS, LENGTH, WIDTH = 2, 4, 96, 8


def whole_tensors() -> list[Tensor]:
    """q, k, v and the gradient of the result, [s, b, n, d], the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    shape = (LENGTH, SAMPLES, HEADS, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def ours(kind: str, cp: ContextParallel) -> list[Tensor]:
    """The result and the gradients of q, k and v, of my rows."""
    *inputs, grad = (shard_sequence(x, cp.axis, dim=0) for x in whole_tensors())
    q, k, v = (x.requires_grad_() for x in inputs)
    dropout = AttentionDropout(0.0, SampleDropoutKeys(0), 0, 0)
    out = METHODS[kind].attend(AttentionInputs(q, k, v, None, dropout, "auto", _whole_samples), cp)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def _whole_samples(q: Tensor, k: Tensor, v: Tensor, _: None) -> Tensor:
    heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)


def torchs(axis: Axis, rotate: str) -> list[Tensor]:
    theirs._cp_options.convert_to_f32 = False
    heads = [shard_sequence(x, axis, dim=0).permute(1, 2, 0, 3).contiguous() for x in whole_tensors()]
    return of_torch(heads, rotate)


def of_one_process(axis: Axis) -> list[Tensor]:
    *inputs, grad = whole_tensors()
    q, k, v = (x.requires_grad_() for x in inputs)
    out = _whole_samples(q, k, v, None)
    out.backward(grad)
    return [shard_sequence(x, axis, dim=0) for x in (out.detach(), q.grad, k.grad, v.grad)]


def through_host(kind: str, cp: ContextParallel) -> list[Tensor]:
    """Transfers as those of a device over gloo: from a copy and into another tensor."""
    with patch.object(collectives, "sends_from_host", lambda group, x: True):
        return ours(kind, cp)


def compare(what: str, got: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("result", "dq", "dk", "dv"), got, expected, strict=True):
        worst = ((a - b).abs().max() / b.abs().max()).item()
        assert worst <= 1e-14, f"{what}: {name} differs by {worst}"
    print(f"{what} agree", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    sizes = {"context_parallel_size": ranks, "hierarchical_context_parallel_sizes": [2, ranks // 2]}
    mesh = parallel_state.initialize_model_parallel(**sizes)
    axis = mesh["cp"]
    cp = ContextParallel(axis, heads=mesh["cp_heads"], ring=mesh["cp_ring"])
    found: dict[str, Callable[[], list[Tensor]]] = {
        "one process": lambda: of_one_process(axis),
        "torch's ring": lambda: torchs(axis, "alltoall"),
        "torch's gathering": lambda: torchs(axis, "allgather"),
        "transfers through host memory": lambda: through_host("p2p", cp),
    }
    for kind in METHODS:
        mine = ours(kind, cp)
        for name, other in found.items():
            compare(f"{kind} and {name}", mine, other())


if __name__ == "__main__":
    main()
