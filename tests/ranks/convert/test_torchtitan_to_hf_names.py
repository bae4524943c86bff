"""Checkpoints of torchtitan, read as they lie: logits of plain PyTorch, from chunks that torch's own writer has made of two ranks.

The writer is torch.distributed.checkpoint, in two processes with DTensors, as FSDP and tensor-parallel layers hold them.
"""

import json
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import ids, read_record, read_tensors, weight
from local_ranks import run_ranks
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from whole_run import run

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.load_model import load_gpt, single_rank_mesh
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert

HIDDEN, HEADS, GROUPS, WIDTH, FFN, LAYERS, WORDS, LENGTH = 24, 6, 2, 4, 42, 3, 31, 9
BASE, EPSILON = 10000.0, 1e-5
CONFIG = {
    **{"model_type": "llama", "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": FFN, "dtype": "float64"},
    **{
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "rms_norm_eps": EPSILON,
    },
    **{"rope_theta": BASE, "max_position_embeddings": 32, "tie_word_embeddings": False},
}


# ---------------------------------------------------------------- the oracle: a Llama with torchtitan's names


def weights() -> dict[str, Tensor]:
    shapes = {"tok_embeddings.weight": (WORDS, HIDDEN), "norm.weight": (HIDDEN,), "output.weight": (WORDS, HIDDEN)}
    for i in range(LAYERS):
        rows = {"attention.wq": HEADS * WIDTH, "attention.wk": GROUPS * WIDTH, "attention.wv": GROUPS * WIDTH}
        rows |= {"feed_forward.w1": FFN, "feed_forward.w3": FFN}
        layer = {name: (count, HIDDEN) for name, count in rows.items()}
        layer |= {"attention.wo": (HIDDEN, HEADS * WIDTH), "feed_forward.w2": (HIDDEN, FFN)}
        layer |= {"attention_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    draw = torch.Generator().manual_seed(3)
    return {name: 0.4 * torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()}


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * scale


def rotated(x: Tensor) -> Tensor:
    """x [s, n, d]: neighbours are the two parts of a complex number, turned by position x frequency."""
    turns = torch.arange(len(x)).double()[:, None] * BASE ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)[:, None]).flatten(-2)


def logits(w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """[s, words]"""
    x = w["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        layer = {
            name.removeprefix(f"layers.{i}."): value for name, value in w.items() if name.startswith(f"layers.{i}.")
        }
        h = normed(x, layer["attention_norm.weight"])
        q, k, v = (h @ layer[f"attention.w{name}.weight"].T for name in "qkv")
        q, k, v = (
            rotated(q.unflatten(-1, (-1, WIDTH))),
            rotated(k.unflatten(-1, (-1, WIDTH))),
            v.unflatten(-1, (-1, WIDTH)),
        )
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        scores = torch.einsum("snd,tnd->nst", q, k) / WIDTH**0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        seen = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + torch.einsum("nst,tnd->snd", seen, v).flatten(1) @ layer["attention.wo.weight"].T
        h = normed(x, layer["ffn_norm.weight"])
        gated = torch.nn.functional.silu(h @ layer["feed_forward.w1.weight"].T) * (
            h @ layer["feed_forward.w3.weight"].T
        )
        x = x + gated @ layer["feed_forward.w2.weight"].T
    return normed(x, w["norm.weight"]) @ w["output.weight"].T


# ---------------------------------------------------------------- its folder, by torch's writer on two ranks


def write_rank(folder: Path, rank: int) -> None:
    """Rows on both ranks as FSDP has them, uneven where they are odd; columns where a tensor-parallel layer has them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    mesh, state = init_device_mesh("cpu", (2,)), {}
    for name, value in weights().items():
        columns = name.endswith(("wo.weight", "w2.weight"))
        state[name] = distribute_tensor(value, mesh, [Shard(1 if columns else 0)])
        state[f"optimizer.state.{name}.exp_avg"] = distribute_tensor(value.float(), mesh, [Shard(0)])
    state |= {"train_state": {"step": torch.tensor(5)}, "lr_scheduler": {"last_epoch": 5}}
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("titan") / "step-5"
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch's tensors first, for seconds each
    ranks = [fork.Process(target=write_rank, args=(root, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert len(list(root.glob("*.distcp"))) == 2
    (root / "config.json").write_text(json.dumps(CONFIG))
    return root


def model_of(root: Path, mesh=None) -> tuple[torch.nn.Module, dict]:
    mesh = mesh or single_rank_mesh()
    checkpoint = open_any(root, world=mesh["world"])
    config = ModelConfig(
        **checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8, "fp64": True}
    )
    sizes = {"vocab_size": checkpoint.state["vocab_size"], "positions": config.max_position_embeddings}
    return load_gpt(checkpoint, config, mesh=mesh, **sizes), sizes


def scores_of(model: torch.nn.Module, tokens: list[list[int]]) -> Tensor:
    given = torch.tensor(tokens)
    return model(given, torch.arange(given.shape[1]).expand_as(given))[..., :WORDS].detach()


@pytest.mark.sweep
def test_logits_are_those_of_plain_torch(folder: Path):
    tokens = [row[:LENGTH].tolist() for row in ids()]
    expected = torch.stack([logits(weights(), row) for row in tokens])
    assert (scores_of(model_of(folder)[0], tokens) - expected).abs().max() < 1e-10


@pytest.mark.sweep
def test_four_ranks_have_the_logits_of_plain_torch(folder: Path):
    """TP 2 x PP 2: what the last stage would choose the next word by, after a prompt and after each word that it chose."""
    prompt = [int(word) for word in ids()[0][:LENGTH]]

    def work(mesh) -> list[tuple[list[int], Tensor]]:
        (model, sizes), seen = model_of(folder, mesh), []

        def choose(scores: Tensor) -> int:
            seen.append(scores[:WORDS].clone())
            return int(scores.argmax())

        options = {"max_new_tokens": 4, "max_length": sizes["positions"], "stop_id": None, "mesh": mesh}
        (new,) = zip(*generate_batch(model, [prompt], choose=[choose], **options))
        return [([*prompt, *new[:count]], scores) for count, scores in enumerate(seen)]

    found = [one for of_rank in run_ranks({"tp": 2, "pp": 2}, work) for one in of_rank]
    assert len(found) >= 4
    for tokens, scores in found:
        assert (scores - logits(weights(), tokens)[-1]).abs().max() < 1e-10


@pytest.mark.full
def test_the_folder_becomes_a_hugging_face_folder_and_a_run_starts_from_it(folder: Path, tmp_path: Path, capsys):
    """Its queries and keys lie as that form has them, so that what is read back computes the same."""
    assert checkpoint_convert.main(["--load", str(folder), "--save-hf", str(tmp_path / "hf")]) == 0
    found, w = read_tensors(tmp_path / "hf"), weights()
    assert found["lm_head.weight"][2] == w["output.weight"].numpy().tobytes()
    halves = w["layers.1.attention.wk.weight"].unflatten(0, (GROUPS, WIDTH // 2, 2)).transpose(1, 2).flatten(0, 2)
    assert found["model.layers.1.self_attn.k_proj.weight"][2] == halves.contiguous().numpy().tobytes()
    tokens = [row[:LENGTH].tolist() for row in ids()]
    assert (scores_of(model_of(tmp_path / "hf")[0], tokens) - scores_of(model_of(folder)[0], tokens)).abs().max() == 0
    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 25 --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu"
    run(f"--load {folder} --seq-length 16 --train-iters 1 --save {tmp_path / 'run'}", tiny=rest.split())
    told = capsys.readouterr().out
    assert "loaded weights of iteration 0" in told and "a checkpoint of torchtitan" in told


# ---------------------------------------------------------------- other names, and what is refused

_OTHERS = (
    ("embed_tokens", "tok_embeddings"),
    ("input_layernorm", "attention_norm"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
)
_OTHERS += (("post_attention_layernorm", "ffn_norm"), ("down_proj", "w2"), ("o_proj", "wo"), ("mlp", "feed_forward"))
_OTHERS += (("self_attn", "attention"), (r"([qkv])_proj", r"qkv_linear.w\1"), (r"^model\.", ""))


def written_by_one(root: Path, case: str, **changed) -> None:
    """A recorded model of transformers in one rank's folder, under the names of 2026."""
    record, values = read_record(case), {}
    for theirs, shape in record["shapes"].items():
        name = theirs
        for old, new in _OTHERS:
            name = re.sub(old, new, name)
        values[name] = torch.from_numpy(weight(theirs, tuple(shape)).copy())
    dcp.save(values | changed, checkpoint_id=root, no_dist=True)
    (root / "config.json").write_text(json.dumps(record["config"]))


def test_a_qwen3_gives_the_scores_of_transformers(tmp_path: Path):
    """Its heads rotate in halves in both forms."""
    written_by_one(tmp_path / "titan", "qwen3")
    expected = torch.tensor(read_record("qwen3")["scores"], dtype=torch.float64)
    assert (scores_of(model_of(tmp_path / "titan")[0], ids()) - expected).abs().max() < 1e-10


@pytest.mark.full
def test_what_is_not_this_model_is_refused(folder: Path, tmp_path: Path):
    (tmp_path / "bare").mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / "bare" / file.name).hardlink_to(file)
    with pytest.raises(ConfigError, match=r"config\.json, of a llama or qwen3"):
        open_any(tmp_path / "bare")
    for changed, told in (
        ({"num_hidden_layers": 2}, "layers.2.* no place|layers.2"),
        ({"tie_word_embeddings": True}, "one differs from the other"),
        ({"num_attention_heads": 4}, "other shapes"),
        ({"model_type": "mistral"}, "of torchtitan.s models only llama, qwen3 can be read"),
    ):
        (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG | changed))
        with pytest.raises((ConfigError, CheckpointError), match=told):
            open_any(tmp_path / "bare")
    written_by_one(tmp_path / "more", "qwen3", **{"layers.0.moe.router.gate.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"moe\.router"):
        open_any(tmp_path / "more")
