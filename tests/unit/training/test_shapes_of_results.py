"""Shapes that a prediction of memory remembers are those that torch computes."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.memory import shapes_of_results
from megatron.training.memory.forecast_memory_along_schedule import forecast
from megatron.training.memory.shapes_of_results import ShapesOfResults
from tools.estimating.job import read


class Remembering(TorchDispatchMode):
    """Runs operators through `ShapesOfResults`, as a prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = ShapesOfResults()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.shapes.run(func, args, kwargs or {})


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(value: object) -> object:
    if isinstance(value, Tensor):
        memory = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), memory
    return tuple(described(each) for each in value)


CALLS = {
    "product": lambda: made(3, 4) @ made(4, 5),
    "transposed": lambda: made(4, 3).t() @ made(4, 5),
    "half": lambda: made(3, 4, dtype=torch.bfloat16) + made(4, dtype=torch.float32),
    "integer and integer": lambda: made(3, dtype=torch.int64) + 1,
    "integer and number": lambda: made(3, dtype=torch.int64) + 1.0,
    "integer and bool": lambda: made(3, dtype=torch.int64) * True,
    "number": lambda: made(3, dtype=torch.bfloat16) * torch.tensor(2.0, device="meta"),
    "vector": lambda: made(3, dtype=torch.bfloat16) * made(1),
    "rows": lambda: made(6, 4)[2:4],
    "parts": lambda: made(6, 4).split([1, 5]),
    "joined": lambda: torch.cat([made(2, 4), made(3, 4)]),
    "joined otherwise": lambda: torch.cat([made(2, 4), made(2, 4)], dim=1),
    "two results": lambda: tuple(made(3, 5).max(dim=1)),
    "in place": lambda: made(3, 4).mul_(2),
    "into": lambda: torch.mm(made(3, 4), made(4, 5), out=made(3, 5)),
    "into what grows": lambda: torch.mm(made(3, 4), made(4, 5), out=made(0)),
    "into columns": lambda: torch.mul(made(3, 4), 2, out=made(3, 8)[:, 4:]),
    "other dimensions": lambda: made(3, 4).unsqueeze_(0),
    "as float": lambda: made(3, 4, dtype=torch.bfloat16).float(),
    "as it is": lambda: made(3, 4).float(),
    "norm": lambda: torch.ops.aten.native_layer_norm(made(3, 4), [4], made(4), None, 1e-5),
    "gradients, one left out": lambda: torch.ops.aten.native_layer_norm_backward(
        made(3, 4), made(3, 4), [4], made(3, 1), made(3, 1), made(4), None, [True, True, False]
    )[:2],
    "in the order of memory": lambda: torch.empty_like(made(4, 3).t()),
}


def test_each_result_is_that_of_torch_the_first_and_the_second_time():
    """All calls share what is remembered, so one that depends on more than its key would show."""
    with Remembering() as mode:
        twice = [{name: described(call()) for name, call in CALLS.items()} for _ in range(2)]
    expected = {name: described(call()) for name, call in CALLS.items()}
    assert twice == [expected, expected]
    assert len(mode.shapes._known) > 15


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten._unsafe_view(x, [4, 3]),
        lambda x: torch.ops.aten._reshape_alias(x, [4, 3], [3, 1]),
        lambda x: x.view(12),
        lambda x: x.to(torch.float32),
        lambda x: torch.mul(x, 2, out=x),
    ],
    ids=["unsafe view", "alias", "view", "to", "into"],
)
def test_what_shares_memory_shares_it_the_second_time(call):
    x = made(3, 4)
    with Remembering():
        results = [call(x) for _ in range(2)]
    assert {each.untyped_storage()._cdata for each in results} == {x.untyped_storage()._cdata}


def test_a_result_of_the_second_time_has_memory_of_its_own_and_one_in_place_that_of_its_argument():
    x = made(3, 4)
    with Remembering():
        first, second = x * 2, x * 2
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert x.mul_(2) is x and x.mul_(2) is x


def test_the_result_is_the_argument_that_is_written_also_after_a_call_with_one_tensor_in_both_places():
    x, y, z = (made(3, 4) for _ in range(3))
    shapes, mul = ShapesOfResults(), torch.ops.aten.mul.out
    assert shapes.run(mul, (x, x), {"out": x}) is x
    assert shapes.run(mul, (y, y), {"out": z}) is z
    assert shapes.run(mul, (x, y), {"out": z}) is z


JOBS = {
    "gpt": "--num-layers 3 --recompute-granularity selective",
    "bfloat16 in parts": "--num-layers 4 --bf16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    "experts": "--num-layers 2 --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--swiglu --disable-bias-linear --zero-stage 2",
    "experts with room": "--num-layers 2 --num-experts 4 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
    "--moe-shared-expert-intermediate-size 32",
    "another optimizer": "--num-layers 2 --optimizer muon --normalization RMSNorm --position-embedding-type rope",
    "in the bubble": "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("more", JOBS.values(), ids=JOBS)
def test_a_prediction_is_that_in_which_torch_computes_every_shape(more: str, device: str, monkeypatch):
    size = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 16 --vocab-size 60"
    job = read(f"{size} {more} --world-size 4 --device {device}".split()).job
    remembered = forecast(job)
    monkeypatch.setattr(shapes_of_results, "_makes_or_writes_tensors", lambda func: False)
    assert forecast(job) == remembered
