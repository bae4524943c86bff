"""An optimizer of torch.optim trains a module of plain torch in `DistributedDataParallel` by Megatron's signature, as it does in one process."""

import pytest
import torch
from local_ranks import run_ranks
from said import raises_telling
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

STEPS, RANKS, ACCUMULATED = 3, 2, 2


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def samples() -> torch.Tensor:
    return torch.randn(STEPS, RANKS, ACCUMULATED, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def of_one_process() -> list[torch.Tensor]:
    module = make_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for batch in samples():
        optimizer.zero_grad()
        module(batch).square().sum().div(7.0).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def finalized(model: DistributedDataParallel) -> None:
    finalize_model_grads([model], torch.tensor(3.5))  # 7 over both ranks


def synced(model: DistributedDataParallel) -> None:
    model.start_grad_sync()
    model.finish_grad_sync()
    model.scale_gradients(1 / 7)


@pytest.mark.parametrize("end", [finalized, synced])
@pytest.mark.parametrize("overlap", [False, True])
def test_torchs_adam_trains_as_in_one_process(end, overlap):
    def work(mesh):
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, bucket_size=10, check_for_nan_in_grad=True
        )
        model = DistributedDataParallel(config=None, ddp_config=settings, module=make_module())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for batch in samples():
            optimizer.zero_grad()
            first, last = batch[mesh["dp"].rank]
            with model.no_sync():
                model(first).square().sum().backward()
            model(last).square().sum().backward()
            end(model)
            optimizer.step()
            with torch.no_grad():
                model(first)  # an evaluation leaves the gradients where they are
        return [parameter.detach() for parameter in model.parameters()]

    for rank in run_ranks({"dp": RANKS}, work):
        for got, expected in zip(rank, of_one_process(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gradients_that_nobody_zeroed_are_refused():
    def work(mesh):
        model = DistributedDataParallel(None, DistributedDataParallelConfig(), make_module())
        for _ in range(2):
            model(samples()[0, 0, 0]).sum().backward()
            finalize_model_grads([model])

    with raises_telling(RuntimeError, "zero_grad_buffer"):
        run_ranks({"dp": 2}, work)


def test_a_validation_before_the_first_backward_leaves_no_gradient():
    def work(mesh):
        model = DistributedDataParallel(None, DistributedDataParallelConfig(), make_module())
        finalize_model_grads([model])
        assert all(parameter.grad is None for parameter in model.parameters())
        model(samples()[0, 0, 0]).sum().backward()
        finalize_model_grads([model])
        plain = make_module()
        plain(samples()[0, 0, 0]).sum().backward()
        for parameter, one in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(parameter.grad, 2 * one.grad)  # summed over the ranks

    run_ranks({"dp": 2}, work)


def test_bfloat16_gradients_are_rounded_sums_of_float32():
    def work(mesh):
        model = DistributedDataParallel(None, DistributedDataParallelConfig(), make_module().bfloat16())
        model(samples()[0, 0, 0].bfloat16()).sum().backward()
        finalize_model_grads([model], 2.0)
        for parameter in model.parameters():
            assert parameter.main_grad.dtype is torch.float32
            assert torch.equal(parameter.grad, parameter.main_grad.bfloat16())

    run_ranks({"dp": 2}, work)


def test_what_is_not_built_is_refused_by_name():
    def work(mesh):
        with raises_telling(ConfigError, "fp8_param_gather"):
            DistributedDataParallel(None, DistributedDataParallelConfig(fp8_param_gather=True), make_module())

    run_ranks({}, work)


def test_parameters_of_the_first_rank_are_everybodys():
    def work(mesh):
        module = make_module()
        with torch.no_grad():
            module[0].weight.fill_(mesh["dp"].rank + 1.0)
        model = DistributedDataParallel(None, DistributedDataParallelConfig(), module)
        model.broadcast_params()
        return module[0].weight.unique().tolist()

    assert run_ranks({"dp": 2}, work) == [[1.0], [1.0]]
