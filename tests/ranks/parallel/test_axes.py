"""Gradients, norms and shards of state where ranks share sequences, or hold other experts, than data parallelism alone would say.

No layer divides anything over these axes yet. A model of plain parameters shows that all beneath a layer is ready for them: the
driver's sums, the buffers of every ZeRO stage, the norm and the update give the numbers of one process.
"""

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL
from megatron.core.sharding.placement import Placement

SAMPLES, TOKENS, WIDTH, EXPERTS = 4, 4, 6, 4


class Layer(nn.Module):
    """A matrix that every token passes through, and experts, of which each takes its share of the tokens of all."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        dense, experts = (torch.randn(shape, generator=draw).double() for shape in ((WIDTH, WIDTH), (EXPERTS, WIDTH)))
        self.mesh, self.dense = mesh, nn.Parameter(dense)
        ep = mesh["ep"]
        self.experts = nn.Parameter(experts.chunk(ep.size)[ep.rank].clone())
        self.experts.placement = Placement(
            tuple(experts.shape), init=None, shard={"ep": 0}, reduce_over=EXPERT_DATA_PARALLEL
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: this rank's tokens [n, WIDTH]. The sum of their losses, and of those that its experts have of the tokens of all of ep."""
        ep = self.mesh["ep"]
        rows = collectives.all_gather(x, ep)
        mine = torch.arange(self.experts.shape[0]) + ep.rank * self.experts.shape[0]
        weights = torch.stack([(rows.sum(dim=1) * (e + 1)).sin() for e in mine.tolist()], dim=1)
        return (x @ self.dense).square().sum() + ((rows @ self.experts.T).square() * weights).sum()


def steps(mesh: Mesh, config: DataParallelConfig) -> tuple[list[float], float, dict[str, Tensor]]:
    """Norms of two steps, the number of all tokens, and this rank's whole parameters."""
    model = Layer(mesh)
    chunk = DistributedDataParallel(model, mesh, config)
    optimizer = FlatOptimizer(chunk.buffers, OptimizerConfig(clip_grad=1.0), mesh)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    x = x.chunk(mesh.samples.size)[mesh.samples.rank].chunk(mesh["cp"].size, dim=1)[mesh["cp"].rank].reshape(-1, WIDTH)
    norms, tokens = [], 0.0
    for _ in range(2):
        chunk.zero_grad_buffer()
        chunk.begin_microbatch(0, backward=True)
        chunk(x).backward()
        chunk.finish_grad_reduce()
        tokens = collectives.all_reduce(torch.tensor(float(len(x)), dtype=torch.float64), mesh.tokens).item()
        norm, factor = optimizer.clip_factor(tokens)
        norms.append(norm)
        optimizer.step(0.1, factor=factor)
        chunk.gather_params()
        chunk.finish_param_gather()
    # In stage 3 nobody has whole parameters between steps; the second norm follows from the first update.
    got = {name: p.detach().clone() for name, p in model.named_parameters()} if config.stage < 3 else {}
    return norms, tokens, got


@pytest.fixture(scope="module")
def alone():
    (result,) = run_ranks({}, lambda mesh: steps(mesh, DataParallelConfig()))
    return result


SIZES = [
    {"cp": 2},
    {"cp": 2, "dp": 2, "ep": 2},
    {"cp": 2, "dp": 2, "ep": 4},
    {"dp": 4, "ep": 2, "replicas": 2},
    {"cp": 4, "ep": 2, "etp": 1},
]


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_step_over_sequences_and_experts_is_that_of_one_process(sizes: dict, stage: int, alone):
    norms, tokens, whole = alone
    config = DataParallelConfig(
        zero_stage=stage, num_distributed_optimizer_instances=sizes.get("replicas", 1) if stage else 1
    )
    if not stage:
        sizes = {name: size for name, size in sizes.items() if name != "replicas"}
    for rank, (got_norms, got_tokens, got) in enumerate(run_ranks(sizes, lambda mesh: steps(mesh, config))):
        assert got_tokens == tokens == SAMPLES * TOKENS
        assert got_norms == pytest.approx(norms, rel=1e-12), rank
        for name, value in got.items():
            ep = sizes.get("ep", 1) if name == "experts" else 1  # which varies fastest in these sizes
            assert (value - whole[name].chunk(ep)[rank % ep]).abs().max() < 1e-12, (rank, name)
