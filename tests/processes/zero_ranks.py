"""What one rank of test_zero_processes.py does: trains in several ways over gloo, and compares what comes out, on the spot.

zero_ranks.py bits FOLDER         the cases of `bits_cases` for so many ranks: all that add in one order have the same bits
zero_ranks.py bits+fsdp2 FOLDER   and stage 3 against torch's fully_shard

FOLDER: for what is offloaded to files. The tests start 2 and 4 ranks; 8, for tensor and pipeline parallelism at once and for hybrid
shards in every layout, are started by hand:

torchrun --nproc-per-node 8 tests/processes/zero_ranks.py bits /tmp
"""

import sys
from dataclasses import replace
from itertools import combinations, groupby, product, starmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from covering import cover
from tiny_run import SEED, SEQ, TINY_GPT2, VOCAB, Layout, forward_step, microbatches, put_together, train_rank
from zero_matrix import STAGES, several_slices

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig

MODEL = replace(TINY_GPT2, fp64=False)
DP = 2  # data-parallel ranks of a stage; a hybrid has as many groups of them: gloo adds three parts and more in orders of its own
BITS = {
    "stage": tuple(STAGES),
    "overlap": (False, True),
    "accumulation": (1, 3),
    "recompute": ("none", "selective", "uniform 1"),
    "offload": ("none", "host", "file"),
    "layout": ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)),  # tp, pp, virtual stages
    "bf16": (False, True),
}


class BitsCase(NamedTuple):
    """One choice of each dimension, in the order of BITS."""

    stage: str
    overlap: bool
    accumulation: int
    recompute: str
    offload: str
    layout: tuple[int, int, int]
    bf16: bool

    @property
    def tied(self) -> bool:
        """With each choice of three dimensions in half of what the others choose."""
        return (BITS["layout"].index(self.layout) + self.bf16 + self.accumulation // 3) % 2 == 0

    @property
    def dp(self) -> int:
        return DP * DP if "h" in self.stage else DP

    @property
    def ranks(self) -> int:
        return self.dp * self.layout[0] * self.layout[1]

    @property
    def microbatches(self) -> int:
        _, pp, v = self.layout
        return self.accumulation * (pp if v > 1 else 1)

    @property
    def reference(self) -> "BitsCase":
        """The plainest case that adds the same numbers in the same order. Stages 0 and 1 add a rank's microbatches first, 2 and 3 the
        ranks' first, which is one order for one microbatch."""
        first = {"0": "0", "1": "0"}.get(self.stage, "0" if self.microbatches == 1 else "2")
        return self._replace(
            stage="hsdp" if "h" in self.stage else first, overlap=False, recompute="none", offload="none"
        )


def bits_cases() -> list[BitsCase]:
    """Cases of at most four ranks in which every pair of choices occurs that stands together in any; then cases of eight with the other
    pairs."""
    found: list[BitsCase] = []
    for most in (4, 8):
        possible = [case for case in starmap(BitsCase, product(*BITS.values())) if case.ranks <= most]
        found = list(cover(possible, lambda case: frozenset(combinations(enumerate(case), 2)), chosen=found))
    return found


def train(mesh: Mesh, model: ModelConfig, layout: Layout, batch: int, steps: int) -> dict:
    """Losses on the last stage, and whole gradients and weights, of some steps. Without clipping: a norm is summed in the parts that
    a rank has."""
    known = train_rank(
        mesh, model, layout, steps=steps, global_batch=batch, optimizer=OptimizerConfig(clip_grad=0.0, weight_decay=0.1)
    )
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (known["losses"], known["grads"][-1], known["weights"]))
    losses, grads, weights = zip(*ranks)
    return {"losses": losses[-1], "grads": put_together(grads), "weights": put_together(weights)}


def train_case(case: BitsCase, mesh: Mesh, folder: str) -> dict:
    tp, pp, v = case.layout
    settings = dict(STAGES[case.stage])
    if case.overlap:
        settings |= {"overlap_grad_reduce": True, "ddp_bucket_size": 1500, "overlap_param_gather": case.stage != "0"}
    offload = OffloadConfig(
        optimizer_cpu_offload=case.offload == "host",
        offload_dir=folder if case.offload == "file" else None,
        offload_params=case.offload != "none" and settings["zero_stage"] == 3,
    )
    m = case.microbatches
    layout = Layout(
        tp=tp,
        pp=pp,
        v=v,
        dp=case.dp,
        m=m,
        recompute=case.recompute,
        schedule="interleaved" if v > 1 else "1f1b",
        data_parallel=DataParallelConfig(**settings),
        offload=offload,
        poison=case.stage == "3",
    )
    model = replace(MODEL, bf16=case.bf16, untie_embeddings_and_output_weights=not case.tied)
    with several_slices():
        return train(mesh, model, layout, batch=2 * case.dp * m, steps=2)


def compare_bits(mesh_of, folder: str) -> None:
    """The cases for as many ranks as there are."""
    mine = [case for case in bits_cases() if case.ranks == parallel_state.launched_world_size()]
    for reference, cases in groupby(sorted(mine, key=lambda case: case.reference), lambda case: case.reference):
        mesh = mesh_of(*reference.layout, reference.dp // DP)
        expected = train_case(reference, mesh, folder)
        for case in cases:
            got = train_case(case, mesh, folder)
            assert got["losses"] == expected["losses"], (case, got["losses"], expected["losses"])
            for what in ("grads", "weights"):
                assert got[what].keys() == expected[what].keys(), case
                for name, values in got[what].items():
                    assert torch.equal(values, expected[what][name]), f"{what} of {name} in {case}"


def compare_with_fsdp2(mesh_of, _: str) -> None:
    """Three steps of AdamW in float64, to rounding; fully_shard on every layer and on the whole."""
    mesh = mesh_of(1, 1, 1, 1)
    for tied in (True, False):
        model = replace(
            MODEL, fp64=True, hidden_dropout=0.0, attention_dropout=0.0, untie_embeddings_and_output_weights=not tied
        )
        layout = Layout(dp=mesh["dp"].size, data_parallel=DataParallelConfig(zero_stage=3))
        ours = train(mesh, model, layout, batch=8, steps=3)["weights"]
        theirs = train_with_fsdp2(mesh, model, batch=8)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            values = values[: len(ours[name])]  # without the rows that pad the vocabulary
            worst = (ours[name] - values).abs().max().item()
            assert worst <= 1e-10 * values.abs().max().item(), f"{name} differs by {worst} (tied={tied})"


def train_with_fsdp2(mesh: Mesh, model: ModelConfig, batch: int) -> dict[str, Tensor]:
    module = build_plain(mesh, model)
    for layer in module.language_model.decoder.layers.values():
        fully_shard(layer)
    fully_shard(module)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    ranks = mesh["dp"].size
    shape = BatchShape(batch // ranks, 1)
    for step in range(3):
        losses, loss_func = forward_step(microbatches(shape, step * batch, mesh), module)
        total, count, _ = loss_func(losses)
        tokens = count.detach().clone()
        dist.all_reduce(tokens)
        (total * ranks / tokens).backward()  # whose gradient fully_shard divides by the ranks
        adam.step()
        adam.zero_grad()
    return {name: p.full_tensor() for name, p in module.named_parameters()}


def build_plain(mesh: Mesh, model: ModelConfig) -> torch.nn.Module:
    """The model with its first weights, in no buffers."""
    module = GPTModel(
        model,
        positions=SEQ,
        vocab_size=VOCAB,
        layers=range(model.num_layers),
        context=LayerContext.from_mesh(mesh, model.params_dtype, SampleDropoutKeys(SEED), fills=False),
    )
    initialize_parameters(module, SEED, mesh)
    return module


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    parallel_state.start_distributed("gloo", 2)

    def mesh_of(tp: int, pp: int, v: int, instances: int) -> Mesh:
        parallel_state.destroy_model_parallel()
        return parallel_state.initialize_model_parallel(
            tp, pp, v if v > 1 else None, num_distributed_optimizer_instances=instances
        )

    for part in what.split("+"):
        {"bits": compare_bits, "fsdp2": compare_with_fsdp2}[part](mesh_of, folder)
    print(f"{what} agree", flush=True)
    parallel_state.stop_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
