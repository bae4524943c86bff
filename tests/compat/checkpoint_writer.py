"""Checkpoints written by the published megatron-core package itself, and the scores that it computes: a tiny GPT over gloo.

    python -I checkpoint_writer.py MEGATRON_CORE_PATH OUTPUT CASES.json

A script of its own, in processes of its own, since that package is called `megatron` too. For each case, a list [name, tp, pp, options]:
OUTPUT/name/dist/iter_0000007 in torch_dist (which needs psutil beside the package), OUTPUT/name/classic/iter_0000007/mp_rank_*, and OUTPUT/name/scores.npy (float64).
"""

import importlib.util
import json
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path

core_path, output, cases_path = sys.argv[1:4]
sys.path[:] = [core_path] + [p for p in sys.path if not os.path.exists(os.path.join(p, "megatron", "__init__.py"))]
warnings.simplefilter("ignore")
if importlib.util.find_spec("psutil") is None:  # the package would only find out in a process that it waits for
    sys.exit(
        f"{Path(__file__).name}: psutil is missing, without which torch_dist is not written: pip install --target {core_path} psutil"
    )

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

torch.Tensor.cuda = lambda self, *args, **options: self  # the package calls these, whatever the device
torch.cuda.synchronize = lambda *args: None
torch.cuda.current_device = lambda: torch.device("cpu")
ITERATION, WORDS, LENGTH, DTYPE = 7, 32, 14, torch.float64
SHAPE = {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, "ffn_hidden_size": 40}


def args_of(tp: int, pp: int, options: dict) -> Namespace:
    """The flags of Megatron-LM's run that made the model."""
    args = {"seq_length": LENGTH, "max_position_embeddings": 16, "iteration": ITERATION, "params_dtype": DTYPE}
    args |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "padded_vocab_size": WORDS}
    args |= {"norm_epsilon": 1e-5, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_gelu_fusion": False}
    args |= {"lr": 1e-4, "rank": 0, "train_iters": 100, "data_path": ["nowhere"]}
    return Namespace(**args | SHAPE | options)


def model_of(args: Namespace) -> GPTModel:
    options = vars(args)
    gated = options.get("swiglu", False)
    config = TransformerConfig(
        **SHAPE,
        num_query_groups=options.get("num_query_groups") if options.get("group_query_attention") else None,
        kv_channels=options.get("kv_channels"),
        normalization=options.get("normalization", "LayerNorm"),
        add_bias_linear=options.get("add_bias_linear", True),
        add_qkv_bias=options.get("add_qkv_bias", False),
        qk_layernorm=options.get("qk_layernorm", False),
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        layernorm_epsilon=1e-5,
        init_method_std=0.3,
        use_cpu_initialization=True,
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        hetereogenous_dist_checkpoint=options.get("by_layer", False),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization),
        WORDS,
        args.max_position_embeddings,
        pre_process=rank == 0,
        post_process=rank == args.pipeline_model_parallel_size - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not options.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=options.get("position_embedding_type", "learned_absolute"),
        rotary_base=options.get("rotary_base", 10000),
    ).to(DTYPE)
    if config.kv_channels and hasattr(model, "rotary_pos_emb"):  # angles in float64 too
        pairs = torch.arange(0, config.kv_channels, 2, dtype=DTYPE) / config.kv_channels
        model.rotary_pos_emb.inv_freq = options.get("rotary_base", 10000) ** -pairs
    return model


def fill(model: GPTModel) -> None:
    """Weights far from those of a start, so that each counts; equal on ranks that have copies."""
    tp = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in sorted(model.named_parameters()):
        own = tp if getattr(parameter, "tensor_model_parallel", False) else 0
        stage = (
            0
            if "word_embeddings" in name or name.startswith("output_layer")
            else parallel_state.get_pipeline_model_parallel_rank()
        )
        seed = sum(ord(c) for c in name.replace("output_layer", "embedding.word_embeddings")) * 100 + stage * 10 + own
        draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
        parameter.data.copy_(1 + 0.3 * draw if "norm" in name and name.endswith("weight") else 0.3 * draw)


def scores_of(model: GPTModel) -> torch.Tensor | None:
    """Of the tokens in `tokens()`, on the last stage."""
    ids = tokens()
    positions = torch.arange(LENGTH).expand_as(ids)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    group, ranks = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    around = dist.get_process_group_ranks(group)
    if rank:
        received = torch.empty(LENGTH, len(ids), SHAPE["hidden_size"], dtype=DTYPE)
        dist.recv(received, around[rank - 1])
        model.set_input_tensor([received])
    with torch.no_grad():
        out = model(ids, positions, mask)
    if rank < ranks - 1:
        dist.send(out.contiguous(), around[rank + 1])
        return None
    return out


def tokens() -> torch.Tensor:
    return torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def write(rank: int, name: str, tp: int, pp: int, options: dict, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp)
    initialize_rng_tracker(inference_rng_tracker=True)
    args, root = args_of(tp, pp, options), Path(output, name)
    model = model_of(args)
    fill(model)
    scores = scores_of(model)
    if scores is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        root.mkdir(parents=True, exist_ok=True)
        np.save(root / "scores.npy", scores.numpy())
    dist.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION, "num_floating_point_operations_so_far": 0}
    for kind in ("dist", "classic"):
        folder = root / kind / f"iter_{ITERATION:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "dist":
            dist_checkpointing.save(state | {"model": model.sharded_state_dict()}, str(folder))
        else:
            stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
            own = folder / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{stage}"
            own.mkdir(parents=True, exist_ok=True)
            torch.save(state | {"model": model.state_dict_for_save_checkpoint()}, own / "model_optim_rng.pt")
        (root / kind / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name, tp, pp, options in json.loads(Path(cases_path).read_text()):
        Path(output, name).mkdir(parents=True, exist_ok=True)
        store = os.path.join(output, name, "store")
        torch.multiprocessing.spawn(write, (name, tp, pp, options, store), nprocs=tp * pp)
