"""Frozen weights in ZeRO stage 3: each rank keeps a shard, a unit is whole while it computes, and no number changes."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.distributed.params_norm_and_zeros import params_norm
from megatron.core.distributed.released_params_and_grads_guards import ReleasedParameter
from megatron.core.parallel.mesh import Mesh
from megatron.training.result_checks.weight_hash_across_replicas import param_replica_differences

WIDTH, RANK, LAYERS = 8, 2, 4


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 3


class Adapted(nn.Module):
    """A frozen linear of torch, whose backward reads the weight in C++, and a trained product of two small matrices."""

    def __init__(self, seed: int):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.base.weight.data, self.base.bias.data = drawn(seed, WIDTH, WIDTH), drawn(seed + 1, WIDTH)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(drawn(seed + 2, RANK, WIDTH)), nn.Parameter(drawn(seed + 3, WIDTH, RANK))
        self.watch: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + x @ self.down.t() @ self.up.t()
        if y.requires_grad:
            y.register_hook(lambda _: self.watch())  # in the middle of the layer's backward
        return x + torch.tanh(y)


class Model(nn.Module):
    """A frozen first layer, which no gradient reaches; adapted layers, put together as `wiring` says; a frozen last one."""

    def __init__(self, wiring: str):
        super().__init__()
        self.wiring = wiring
        self.first, self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.first.weight.data, self.last.weight.data = drawn(1, WIDTH, WIDTH), drawn(2, 3, WIDTH)
        self.first.bias.data, self.last.bias.data = drawn(3, WIDTH), drawn(4, 3)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)
        self.layers = nn.ModuleList([Adapted(10 * number) for number in range(1, LAYERS + 1)])

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        x = self.first(x)
        if self.wiring == "in a row":
            layers = layers[:2] * 2 + layers[2:]
        if self.wiring == "side by side":
            x = layers[0](x) + layers[1](2 * x)
            layers = layers[2:]
        if self.wiring.startswith("recomputed"):
            reentrant = self.wiring == "recomputed by a second backward"
            x = layers[0](x)  # whose output has a gradient, which torch's reentrant form asks of an input
            for pair in (layers[1:3], layers[3:]):
                x = checkpoint(partial(_through, pair), x, use_reentrant=reentrant)
            layers = []
        return self.last(_through(layers, x))


def _through(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def batch(microbatch: int, rank: int) -> Tensor:
    return drawn(1000 + 10 * microbatch + rank, 3, WIDTH)


def step(chunk: DistributedDataParallel, rank: int, m: int = 2) -> None:
    chunk.zero_grad_buffer(m)
    for microbatch in range(m):
        chunk.begin_microbatch(microbatch, backward=False)
        loss = chunk(batch(microbatch, rank)).square().sum()
        chunk.begin_microbatch(microbatch, backward=True)
        loss.backward()
    chunk.start_grad_reduce()
    chunk.finish_grad_reduce()


def wrapped(mesh: Mesh, wiring: str, **settings) -> DistributedDataParallel:
    config = DataParallelConfig(zero_stage=3, poison_released_buffers=True, **settings)
    return DistributedDataParallel(Model(wiring), mesh, config)


WIRINGS = ["once", "in a row", "side by side", "recomputed", "recomputed by a second backward"]
HYBRID = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("settings", [{}, {"overlap_param_gather": True, "overlap_grad_reduce": True}, HYBRID], ids=str)
def test_gradients_are_those_of_one_process(wiring: str, settings: dict):
    """With NaN in released memory; the frozen weights keep their bits."""
    outer = settings.get("num_distributed_optimizer_instances", 1)
    ranks = 2 * outer
    plain = Model(wiring)
    for microbatch in range(2):
        for rank in range(ranks):
            plain(batch(microbatch, rank)).square().sum().backward()
    expected = dict(plain.named_parameters())

    def work(mesh: Mesh) -> tuple[dict, dict, float]:
        chunk = wrapped(mesh, wiring, **settings)
        assert param_replica_differences([chunk], mesh) == []
        for _ in range(2):  # the second step knows the order of the first
            step(chunk, mesh["dp"].rank)
        grads = {
            place.name: (buffer.owned_range(place), buffer.sums.values(place).clone())
            for buffer in chunk.buffers
            for place in buffer.plan.param_ranges
        }
        frozen = {
            place.name: (buffer.param_shard.elements(place), buffer.param_shard.values(place).clone())
            for buffer in chunk.frozen_buffers
            for place in buffer.plan.param_ranges
        }
        return grads, frozen, params_norm([chunk], mesh, "cpu")

    norm = torch.cat([p.detach().flatten() for p in expected.values()]).norm().item()
    for grads, frozen, found in run_ranks({"dp": ranks, "replicas": outer}, work):
        assert grads.keys() == {name for name, p in expected.items() if p.requires_grad}
        for name, ((start, stop), values) in grads.items():
            torch.testing.assert_close(values, expected[name].grad.flatten()[start:stop], rtol=1e-12, atol=1e-13)
        assert frozen.keys() == {name for name, p in expected.items() if not p.requires_grad}
        for name, ((start, stop), values) in frozen.items():
            assert torch.equal(values, expected[name].detach().flatten()[start:stop])
        assert found == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("wiring", ["once", "in a row", "recomputed"])
def test_a_unit_is_gathered_around_its_uses_and_is_alone(wiring: str, ahead: bool):
    """A use gathers a frozen unit once in the forward, and once in the backward if a gradient passes through it, which is not so
    of the first. A trained one stays in the backward until the gradients of all its uses are there. Recomputation gathers
    nothing more. One frozen unit is resident in a backward, two with a prefetch or in a recomputed pair."""
    m, uses = 2, LAYERS + 2 * (wiring == "in a row")

    def work(mesh: Mesh) -> tuple[Counter, int, int]:
        chunk = wrapped(mesh, wiring, overlap_param_gather=ahead)
        frozen = [layer.base.weight for layer in chunk.module.layers] + [chunk.module.last.weight]
        seen = []

        def watch() -> None:
            seen.append(sum(place_in_bucket(weight).bucket._params.is_open for weight in frozen))

        step(chunk, mesh["dp"].rank, m)
        for layer in chunk.module.layers:
            layer.watch = watch
        with mesh.ledger.record() as calls:
            step(chunk, mesh["dp"].rank, m)
        left = sum(not isinstance(weight, ReleasedParameter) for weight in chunk.module.parameters())
        assert len(seen) == m * uses
        return Counter(call.op for call in calls), max(seen), left

    for calls, most, left in run_ranks({"dp": 2}, work):
        forward = 1 + 2 * uses + 1  # first, frozen and trained part of each use, last
        backward = uses + LAYERS + 1
        assert calls["all_gather"] == m * (forward + backward)
        assert calls["reduce_scatter"] == m * LAYERS
        assert most == (2 if ahead or wiring == "recomputed" else 1)
        assert left == 0


def test_a_rank_keeps_its_share_and_says_what_it_lacks():
    def work(mesh: Mesh) -> tuple[int, int]:
        chunk = wrapped(mesh, "once")
        kept = sum(tensor.nbytes for buffer in chunk.frozen_buffers for tensor in buffer.param_shard.tensors)
        whole = sum(bucket.stop - bucket.start for buffer in chunk.frozen_buffers for bucket in buffer.plan.buckets)
        weight = chunk.module.layers[0].base.weight
        assert weight.shape == (WIDTH, WIDTH) and not weight.requires_grad
        with pytest.raises(
            RuntimeError, match=r"(?s)layers\.0\.base\.weight is used while ZeRO stage 3 has released it"
        ):
            weight.sum()
        assert not hasattr(weight, "main_grad")
        return kept, whole

    for kept, whole in run_ranks({"dp": 2}, work):
        assert kept == whole * 8 // 2


def test_integers_may_be_frozen_too():
    """A weight of 8-bit integers with a scale, as a quantised base is."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter((100 * drawn(1, WIDTH, WIDTH)).to(torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.full((1,), 0.01, dtype=torch.float64), requires_grad=False)
            self.gain = nn.Parameter(drawn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain @ (self.weight * self.scale).t()

    plain = nn.Sequential(Quantised(), Quantised())
    for rank in range(2):
        plain(batch(0, rank)).square().sum().backward()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = nn.Sequential(Quantised(), Quantised())
        config = DataParallelConfig(zero_stage=3, poison_released_buffers=True)
        chunk = DistributedDataParallel(model, mesh, config)
        step(chunk, mesh["dp"].rank, m=1)
        return {
            place.name: (buffer.owned_range(place), buffer.sums.values(place).clone())
            for buffer in chunk.buffers
            for place in buffer.plan.param_ranges
        }

    for grads in run_ranks({"dp": 2}, work):
        for name, ((start, stop), values) in grads.items():
            expected = plain.get_parameter(name).grad.flatten()[start:stop]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-13)
