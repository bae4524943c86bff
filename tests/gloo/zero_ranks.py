"""What one rank of test_zero_processes.py does: trains in several ZeRO stages over gloo, and compares what comes out, on the spot.

zero_ranks.py bits           the layouts and precisions of BITS: stages whose sums are added in one order have the same bits
zero_ranks.py bits+fsdp2     and stage 3 against torch's fully_shard
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_run import GPT2, SEED, SEQ, VOCAB, Layout, forward_step, microbatches, train_rank

from megatron.core import parallel_state
from megatron.core.distributed import distributed_data_parallel as ddp
from megatron.core.distributed.distributed_data_parallel import DataParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import OptimizerConfig
from megatron.core.random import DropoutKeys, initialize_parameters
from megatron.core.tensor_parallel.layers import TensorParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.train_step import BatchShape

MODEL = replace(GPT2, hidden_size=16, num_attention_heads=4, fp64=False)
# tp, pp, virtual stages, microbatches, recompute, tied, bfloat16, overlap; two data-parallel ranks each
BITS = [
    (1, 1, 1, 1, "none", True, False, False),
    (1, 1, 1, 3, "uniform 1", False, True, True),
    (2, 1, 1, 1, "selective", True, True, True),
    (2, 1, 1, 3, "none", False, False, False),
    (1, 2, 1, 3, "selective", True, False, True),
    (1, 2, 1, 1, "uniform 1", True, True, False),
    (1, 2, 2, 2, "none", False, True, True),
]


def whole_weights(chunk: ddp.DistributedDataParallel) -> dict[str, Tensor]:
    """Of this rank's part of the model, also in stage 3, where it holds shards."""
    for bucket in chunk._buckets:
        bucket.start_gather()
        bucket.finish_gather()
    found = {name: p.detach().clone() for name, p in chunk.module.named_parameters()}
    for bucket in chunk._buckets:
        bucket.release_params()
    return found


def train(
    mesh: Mesh, model: TransformerConfig, layout: Layout, batch: int, steps: int
) -> tuple[list, dict[str, Tensor]]:
    """Losses and final weights of some steps. Without clipping: a norm is summed in the parts that a rank has."""
    made = []
    original = ddp.DistributedDataParallel.zero_grad_buffer
    ddp.DistributedDataParallel.zero_grad_buffer = lambda self, *m: (made.append(self), original(self, *m))[1]
    try:
        known = train_rank(
            mesh,
            model,
            layout,
            steps=steps,
            global_batch=batch,
            optimizer=OptimizerConfig(clip_grad=0.0, weight_decay=0.1),
        )
    finally:
        ddp.DistributedDataParallel.zero_grad_buffer = original
    weights = {}
    for chunk in dict.fromkeys(made):
        weights |= whole_weights(chunk)
    return known["losses"], weights


def compare_bits(mesh_of) -> None:
    """Of two data-parallel ranks, since gloo adds three and more in orders of its own. Stages 0 and 1 add a rank's microbatches first, 2 and 3 the
    ranks' first, so that all four agree on one microbatch only."""
    for tp, pp, v, m, recompute, tied, bf16, overlap in BITS:
        if 2 * tp * pp != parallel_state.launched_world_size():
            continue
        mesh = mesh_of(tp, pp, v)
        model = replace(MODEL, bf16=bf16, untie_embeddings_and_output_weights=not tied)
        outcomes = {}
        for stage in range(4):
            overlaps = {"overlap_grad_reduce": True, "ddp_bucket_size": 1500, "overlap_param_gather": stage > 0}
            config = DataParallelConfig(zero_stage=stage, **(overlaps if overlap else {}))
            layout = Layout(
                tp=tp, pp=pp, v=v, dp=2, m=m, recompute=recompute, schedule="interleaved" if v > 1 else "1f1b",
                data_parallel=config, poison=stage == 3,
            )  # fmt: skip
            outcomes[stage] = train(mesh, model, layout, batch=4 * m, steps=2)
        for a, b in ((0, 1), (2, 3), (1, 2)) if m == 1 else ((0, 1), (2, 3)):
            (losses, weights), (other_losses, other_weights) = outcomes[a], outcomes[b]
            assert losses == other_losses, (a, b, losses, other_losses)
            assert weights.keys() == other_weights.keys()
            for name, values in weights.items():
                assert torch.equal(values, other_weights[name]), f"stages {a} and {b}: {name} in {layout}"


def compare_with_fsdp2(mesh_of) -> None:
    """Three steps of AdamW in float64, to rounding; fully_shard on every layer and on the whole."""
    mesh = mesh_of(1, 1, 1)
    for tied in (True, False):
        model = replace(
            MODEL, fp64=True, hidden_dropout=0.0, attention_dropout=0.0, untie_embeddings_and_output_weights=not tied
        )
        layout = Layout(dp=mesh["dp"].size, data_parallel=DataParallelConfig(zero_stage=3))
        _, ours = train(mesh, model, layout, batch=8, steps=3)
        theirs = train_with_fsdp2(mesh, model, batch=8)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            worst = (ours[name] - values).abs().max().item()
            assert worst <= 1e-10 * values.abs().max().item(), f"{name} differs by {worst} (tied={tied})"


def train_with_fsdp2(mesh: Mesh, model: TransformerConfig, batch: int) -> dict[str, Tensor]:
    module = build_plain(mesh, model)
    for layer in module.language_model.decoder.layers.values():
        fully_shard(layer)
    fully_shard(module)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8,
    )  # fmt: skip
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


def build_plain(mesh: Mesh, model: TransformerConfig) -> torch.nn.Module:
    """The model with its first weights, in no buffers."""
    tp = TensorParallel(mesh["tp"], False, model.params_dtype, kv=mesh["kv"])
    module = GPTModel(
        model,
        positions=SEQ,
        vocab_size=VOCAB,
        layers=range(model.num_layers),
        tp=tp,
        keys=DropoutKeys(SEED),
        ends=mesh["embd"],
    )
    initialize_parameters(module, SEED, mesh)
    return module


def main(what: str) -> None:
    torch.set_num_threads(1)
    parallel_state.start_distributed("gloo", 2)

    def mesh_of(tp: int, pp: int, v: int) -> Mesh:
        parallel_state.destroy_model_parallel()
        return parallel_state.initialize_model_parallel(tp, pp, v if v > 1 else None)

    for part in what.split("+"):
        {"bits": compare_bits, "fsdp2": compare_with_fsdp2}[part](mesh_of)
    print(f"{what} agree", flush=True)
    parallel_state.stop_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
