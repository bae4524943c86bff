"""Models of plain torch modules, as a fork brings them: layers that a step leaves out, weights that two modules hold, errors in the
middle of a backward. Three steps of sgd with momentum, against plain torch on one process."""

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh

WIDTH, WORDS, RATE, MOMENTUM = 6, 11, 1e-3, 0.9


class Block(nn.Module):
    """A matrix, a factor without dimensions, a module inside, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(torch.tanh(self.linear(x))) * self.gain


class OwnParameter(nn.Parameter):
    """A class of a fork's own, which nobody may exchange for one that waits when it is asked."""


class Words(nn.Module):
    """Words to scores. what: "skips" every second step's second block, "tied" by one parameter in two modules, "shared" block,
    "recomputed" blocks, "frozen" block, parameters "of a class"."""

    def __init__(self, what: str):
        super().__init__()
        torch.manual_seed(1)
        self.what, self.table = what, nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head, self.unused = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, 1)
        if "tied" in what:
            self.head.weight = self.table.weight
        if "shared" in what:
            self.blocks.append(self.blocks[0])
        if "frozen" in what:
            self.blocks[1].requires_grad_(False)
        self.double()
        if "of a class" in what:
            for block in self.blocks:
                block.linear.weight = OwnParameter(block.linear.weight.data)

    def forward(self, ids: Tensor, step: int) -> Tensor:
        x = self.table(ids)
        for number, block in enumerate(self.blocks):
            if not ("skips" in self.what and step % 2 and number == 1):
                x = checkpoint(block, x, use_reentrant=False) if "recomputed" in self.what else block(x)
        return self.head(x)


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(0, WORDS, (2, 3), generator=generator)


def plain(what: str, ranks: int) -> dict[str, Tensor]:
    model = Words(what)
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
    for step in range(3):
        for p in trained:
            p.grad = torch.zeros_like(p)
        for microbatch in range(2):
            for rank in range(ranks):
                model(batch(step, microbatch, rank), step).square().sum().backward()
        sgd.step()
    return {name: p.detach().flatten() for name, p in model.named_parameters()}


def fail(_: Tensor) -> None:
    raise ArithmeticError("in the middle of a backward")


def sharded(mesh: Mesh, what: str, config: DataParallelConfig) -> dict[str, tuple]:
    model = Words(what)
    chunk = DistributedDataParallel(model, mesh, config)
    settings = OptimizerConfig(optimizer="sgd", sgd_momentum=MOMENTUM, weight_decay=0.0, clip_grad=0.0)
    sgd = FlatOptimizer(chunk.buffers, settings, mesh)

    def loss(step: int, microbatch: int) -> Tensor:
        chunk.begin_microbatch(microbatch, backward=False)
        result = chunk(batch(step, microbatch, mesh["dp"].rank), step).square().sum()
        chunk.begin_microbatch(microbatch, backward=True)
        return result

    for step in range(3):
        if "fails" in what and step == 1:
            chunk.zero_grad_buffer(2)
            hook = model.blocks[1].register_forward_hook(lambda _, inputs, output: output.register_hook(fail) and None)
            with pytest.raises(ArithmeticError):
                loss(9, 0).backward()
            hook.remove()
        chunk.zero_grad_buffer(2)
        for microbatch in range(2):
            loss(step, microbatch).backward()
        chunk.start_grad_reduce()
        chunk.finish_grad_reduce()
        sgd.step(RATE)
        chunk.gather_params()
    chunk.finish_param_gather()
    return {
        s.name: (b.owned_range(s), b.owned_params.values(s).flatten().clone())
        for b in chunk.buffers
        for s in b.plan.param_ranges
    }


CASES = [
    ("skips", 1),
    ("skips", 2),
    ("skips", 3),
    ("tied", 3),
    ("tied, recomputed", 3),
    ("tied, shared", 3),
    ("tied, fails", 2),
    ("tied, fails", 3),
    ("frozen, fails", 1),
    ("shared, recomputed, frozen", 3),
    ("skips, recomputed", 0),
    ("of a class", 1),
]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.full] * (n > 0), id=f"{c[0]}-{c[1]}") for n, c in enumerate(CASES)]
)
def test_a_model_of_plain_modules_is_trained_as_torch_does(case: tuple[str, int]):
    """Three ranks; calls end as late as they may, and what is released is NaN: a parameter whose gather nobody waits for, as of a layer
    that a step leaves out, would come on top of its update."""
    what, stage = case
    config = DataParallelConfig(
        zero_stage=stage,
        overlap_grad_reduce=True,
        overlap_param_gather=stage > 0,
        ddp_bucket_size=30,
        poison_released_buffers=True,
    )
    expected = plain(what, 3)
    for got in run_ranks({"dp": 3}, lambda mesh: sharded(mesh, what, config), delayed=True):
        assert "table.weight" in got and ("head.weight" in got) != ("tied" in what)
        for name, ((start, stop), values) in got.items():
            torch.testing.assert_close(values, expected[name][start:stop], rtol=1e-11, atol=1e-13)


class ByHand(nn.Module):
    """A parent that computes with a child's weight, and calls another child's forward beside its hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in "abc")

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second.forward(x @ self.first.weight))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full)])
def test_parameters_that_are_used_beside_their_module_are_waited_for(stage: int):
    """Their gather ends when somebody waits, and holds NaN until then."""

    def outputs(mesh: Mesh) -> list[Tensor]:
        config = DataParallelConfig(zero_stage=stage, overlap_param_gather=True, ddp_bucket_size=30)
        chunk = DistributedDataParallel(ByHand(), mesh, config)
        sgd = FlatOptimizer(chunk.buffers, OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0), mesh)
        x, results = torch.ones(2, WIDTH, dtype=torch.float64), []
        for _ in range(3):
            chunk.zero_grad_buffer(1)
            results.append(chunk(x))
            results[-1].sum().backward()
            chunk.start_grad_reduce()
            chunk.finish_grad_reduce()
            sgd.step(RATE)
            chunk.gather_params()
        weight = chunk.module.first.weight
        assert weight.shape == (WIDTH, WIDTH) and repr(weight).startswith("Parameter containing")
        chunk.finish_param_gather()
        return [y.detach() for y in results]

    plainly, x, expected = ByHand(), torch.ones(2, WIDTH, dtype=torch.float64), []
    for _ in range(3):
        expected.append(plainly(x))
        for p, grad in zip(plainly.parameters(), torch.autograd.grad(expected[-1].sum(), list(plainly.parameters()))):
            p.data.sub_(3 * RATE * grad)
    for got in run_ranks({"dp": 3}, outputs, delayed=True):
        torch.testing.assert_close(got, [y.detach() for y in expected], rtol=1e-12, atol=1e-14)


def set_data(model: Words) -> None:
    model.head.weight.data = torch.zeros_like(model.head.weight.data)


AFTERWARDS = {
    "half": (
        lambda model: model.bfloat16(),
        "table.weight, blocks.0.gain.*not a view of the trained buffer any more.*copy_",
    ),
    "data": (set_data, "head.weight: not a view of the trained buffer any more"),
    "thawed": (lambda model: model.blocks[1].requires_grad_(True), "blocks.1.gain.*frozen when the model was wrapped"),
    "same type": (lambda model: model.double().to("cpu"), None),
    "copy": (lambda model: model.head.weight.data.copy_(torch.zeros(WORDS, WIDTH)), None),
}


@pytest.mark.parametrize("what", AFTERWARDS)
def test_what_is_done_to_a_wrapped_model_is_refused_where_it_would_stop_training_it(what: str):
    change, said = AFTERWARDS[what]
    (mesh,) = run_ranks({}, lambda mesh: mesh)
    chunk = DistributedDataParallel(Words("frozen"), mesh)
    change(chunk.module)
    if said is None:
        chunk.zero_grad_buffer()
        return
    with pytest.raises(RuntimeError, match=said):
        chunk.zero_grad_buffer()


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_layer_that_is_frozen_midway_stays_as_it_is(stage: int):
    """Neither decay nor momentum moves it, and it goes on when it is trained again. torch leaves out what has no gradient."""
    from_step, to_step, settings = 1, 3, {"lr": RATE, "momentum": MOMENTUM, "weight_decay": 0.1}

    def is_frozen(step: int) -> bool:
        return from_step <= step < to_step

    def weights(mesh: Mesh) -> dict[str, tuple]:
        model = ByHand()
        chunk = DistributedDataParallel(model, mesh, DataParallelConfig(zero_stage=stage))
        config = OptimizerConfig(optimizer="sgd", sgd_momentum=MOMENTUM, weight_decay=0.1, clip_grad=0.0)
        sgd = FlatOptimizer(chunk.buffers, config, mesh)
        for step in range(4):
            model.third.requires_grad_(not is_frozen(step))
            chunk.zero_grad_buffer(1)
            model.third(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward() if not is_frozen(step) else None
            chunk.start_grad_reduce()
            chunk.finish_grad_reduce()
            sgd.step(RATE)
            chunk.gather_params()
        return {
            s.name: (b.owned_range(s), b.owned_params.values(s).flatten().clone())
            for b in chunk.buffers
            for s in b.plan.param_ranges
        }

    model = ByHand()
    sgd = torch.optim.SGD(model.parameters(), **settings)
    for step in range(4):
        sgd.zero_grad(set_to_none=True)
        for p in (model.first.weight, model.second.weight):
            p.grad = torch.zeros_like(p)  # never frozen: it decays
        if not is_frozen(step):
            (2 * model.third(torch.ones(2, WIDTH, dtype=torch.float64)).sum()).backward()  # of both ranks
        sgd.step()
    for got in run_ranks({"dp": 2}, weights):
        for name, ((start, stop), values) in got.items():
            expected = model.get_parameter(name).detach().flatten()[start:stop]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14, msg=name)
