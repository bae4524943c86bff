"""Runs a release of Megatron core itself on a CPU: one training step of a tiny GPT, and a checkpoint of its weights.

    python -I release_writer.py TREE OUTPUT TP OPTIONS.json

TREE: the release's files, from a clone. A script of its own, in processes of its own, since that package is called `megatron` too.
OUTPUT: step.npz with the tokens, the loss of the step and the norm of its gradient, both in float32; weights/RANK.npz, each rank's
parameters by name; dist/iter_0000007, a checkpoint in torch_dist.
"""

import importlib.util
import json
import os
import sys
import types
import typing
import warnings
from argparse import Namespace
from pathlib import Path

tree, output, tp_size, options_path = sys.argv[1:5]
sys.path[:] = [tree] + [p for p in sys.path if not os.path.exists(os.path.join(p, "megatron", "__init__.py"))]
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (these look for triton, and must not find the stand-in)
import torch._functorch.aot_autograd  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed as dist  # noqa: E402


class Missing(types.ModuleType):
    """Stands for a package that a CPU has no use for: any name of it is a decorator that returns the function."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("constexpr", "dtype", "tensor", "Config"):
            return type(name, (), {"__init__": lambda self, *args, **options: None})

        def decorate(*args: typing.Any, **options: typing.Any) -> typing.Any:
            return args[0] if len(args) == 1 and not options and callable(args[0]) else decorate

        return decorate


for _name in ("triton", "triton.language", "triton.runtime", "triton.testing", "triton.language.extra"):
    sys.modules[_name] = Missing(_name)
sys.modules["triton"].language = sys.modules["triton.language"]
if importlib.util.find_spec("psutil") is None:  # a writer of checkpoints measures its memory
    sys.modules["psutil"] = types.ModuleType("psutil")
    sys.modules["psutil"].Process = lambda *_: types.SimpleNamespace(
        memory_info=lambda: types.SimpleNamespace(rss=0), cpu_affinity=lambda *_: []
    )
if not hasattr(typing, "override"):
    typing.override = lambda function: function
torch.Tensor.cuda = lambda self, *args, **options: self
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *args: None
torch.compile = lambda function=None, **options: function or (lambda inner: inner)
torch.cuda.Stream = lambda *args, **options: None

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

WORDS, LENGTH, ITERATION = 64, 16, 7
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 96}


def model_of(tp: int, options: dict) -> GPTModel:
    gated = options.get("swiglu", False)
    config = TransformerConfig(
        **SHAPE,
        normalization=options.get("normalization", "LayerNorm"),
        add_bias_linear=options.get("add_bias_linear", True),
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        layernorm_epsilon=1e-5,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        WORDS,
        LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=not options.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=options.get("position_embedding_type", "learned_absolute"),
    )


def fill(model: GPTModel, tp_rank: int) -> None:
    """Weights far from those of a start, so that each counts; equal on ranks that have copies."""
    for name, parameter in sorted(model.named_parameters()):
        own = tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(sum(ord(c) for c in name) * 10 + own)
        draw = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.1 * draw if "norm" in name and name.endswith("weight") else 0.1 * draw)


def write(rank: int, tp: int, options: dict) -> None:
    dist.init_process_group("gloo", init_method=f"file://{output}/store", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tp)
    initialize_rng_tracker(inference_rng_tracker=True)
    model = model_of(tp, options)
    fill(model, rank)

    # one step: the mean loss, and the norm over whole parameters
    ids = torch.randint(0, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH).expand(4, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    loss = model(ids[:, :-1], positions, mask, labels=ids[:, 1:].contiguous()).mean()
    loss.backward()
    squares = torch.zeros(1, dtype=torch.float64)
    for parameter in model.parameters():
        if rank == 0 or getattr(parameter, "tensor_model_parallel", False):
            squares += parameter.grad.double().square().sum()
    dist.all_reduce(squares)
    if rank == 0:
        np.savez(f"{output}/step.npz", ids=ids.numpy(), loss=loss.item(), norm=squares.sqrt().item())

    # the weights, and a checkpoint
    Path(output, "weights").mkdir(exist_ok=True)
    np.savez(f"{output}/weights/{rank}.npz", **{name: p.detach().numpy() for name, p in model.named_parameters()})
    args = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "iteration": ITERATION, "rank": 0, "lr": 1e-4}
    args |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "padded_vocab_size": WORDS}
    args |= {"norm_epsilon": 1e-5, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_gelu_fusion": False}
    state = {"args": Namespace(**args | SHAPE | options), "checkpoint_version": 3.0, "iteration": ITERATION}
    folder = Path(output, "dist", f"iter_{ITERATION:07d}")
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state | {"model": model.sharded_state_dict()}, str(folder))
    Path(output, "dist", "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(output).mkdir(parents=True, exist_ok=True)
    settings = json.loads(Path(options_path).read_text())
    Path(output, "store").unlink(missing_ok=True)
    torch.multiprocessing.spawn(write, (int(tp_size), settings), nprocs=int(tp_size))
