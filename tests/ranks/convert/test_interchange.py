"""Folders of other projects, read as they lie by any layout: equal to what transformers computed (tests/support/exchange/record.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, LENGTH, ids, read_record, read_tensors, weight, write_folder, write_folders, write_tensors
from local_ranks import run_ranks
from whole_run import run

from megatron.convert import open_foreign
from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.open_hf_safetensors_folder import head_counts_of, param_mappings
from megatron.convert.plan_hf_folder import to_hf_tensors
from megatron.convert.stream_checkpoint_to_hf_folder import write_hf_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError, placed_tensor, save_checkpoint
from megatron.core.inference.load_model import load_gpt, single_rank_mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import pieces
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each case, of float64."""
    return write_folders(tmp_path_factory.mktemp("hf"), CASES)


def model_of(root: Path, mesh=None, changed: dict | None = None, **options) -> torch.nn.Module:
    checkpoint = open_foreign(root, **({"world": mesh["world"]} if mesh else {}))
    config = ModelConfig(
        **checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8} | (changed or {})
    )
    positions = config.max_position_embeddings
    return load_gpt(
        checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=positions, mesh=mesh, **options
    )


def scores_of(model: torch.nn.Module, words: int, length: int = LENGTH) -> torch.Tensor:
    tokens = torch.tensor(ids())[:, :length]
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :words]


def theirs(root: Path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of ours (parameters or gradients of a whole model) under their names."""
    state = open_foreign(root).state
    config, kind = ModelConfig(**state["config"]["transformer"]), json.loads((root / "config.json").read_text())
    family, found = family_of(kind, "config.json"), {}
    for row in param_mappings(family, config):
        if row.param in ours:
            found |= dict(zip(row.hf_params, to_hf_tensors(row.operation, head_counts_of(config), ours[row.param])))
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_scores_and_gradients_of_transformers(case: str, folders: dict[str, Path]):
    record = read_record(case)
    model, words = model_of(folders[case]), record["config"]["vocab_size"]
    scores = scores_of(model, words)
    assert (scores - torch.tensor(record["scores"], dtype=torch.float64)).abs().max() < 1e-10
    tokens = torch.tensor(ids())
    said = scores_of(model, words, LENGTH - 1)
    torch.nn.functional.cross_entropy(said.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad[:words] if "word_emb" in name else p.grad for name, p in model.named_parameters()}
    found = {
        name: (x * torch.tensor(weight(f"direction of {name}", tuple(x.shape)))).sum()
        for name, x in theirs(folders[case], gradients).items()
    }
    assert found.keys() == record["gradients"].keys()
    for name, value in record["gradients"].items():
        assert abs(found[name] - value) < 1e-10 * max(1, abs(value)), name


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_float32_stays_near_transformers_float64(case: str, folders: dict[str, Path]):
    """Scores to 1e-4 of what is recorded, gradients to 1e-4 of each tensor's largest value in float64."""
    record, tokens, made = read_record(case), torch.tensor(ids()), []
    for fp64 in (True, False):
        model = model_of(folders[case], changed={"fp64": fp64})
        scores = scores_of(model, record["config"]["vocab_size"])
        torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        made.append((scores, {name: p.grad for name, p in model.named_parameters()}))
    (_, exact), (scores, gradients) = made
    assert scores.dtype == torch.float32
    assert (scores - torch.tensor(record["scores"], dtype=torch.float64)).abs().max() < 1e-4
    for name, expected in exact.items():
        assert (gradients[name] - expected).abs().max() <= 1e-4 * expected.abs().max(), name


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_bfloat16_folder_keeps_its_bits(case: str, tmp_path: Path):
    """Read into bfloat16 parameters and written again; read into float64 ones, they are the same numbers."""
    write_folder(tmp_path / "in", read_record(case), "BF16")
    half, whole = (model_of(tmp_path / "in", changed=x) for x in ({"fp64": False, "bf16": True}, {"fp64": True}))
    for (name, mine), other in zip(half.named_parameters(), whole.parameters()):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine.double(), other), name
    write_hf_folder(open_foreign(tmp_path / "in"), tmp_path / "out", most_bytes=20_000)
    found = read_tensors(tmp_path / "out")
    assert found == read_tensors(tmp_path / "in")
    for name, (dtype, shape, data) in found.items():
        rounded = torch.tensor(weight(name, tuple(shape))).bfloat16()
        assert dtype == "BF16" and data == rounded.view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(
    "case, lacking",
    [
        ("llama", ["lm_head.weight"]),
        ("qwen2", ["model.layers.1.self_attn.q_proj.bias"]),
        ("qwen2", [f"model.layers.2.self_attn.{x}_proj.bias" for x in "qkv"]),
        ("gpt2", ["transformer.h.0.mlp.c_fc.bias"]),
    ],
)
def test_a_head_or_a_bias_that_the_config_wants_must_be_there(case: str, lacking: list[str], tmp_path: Path):
    record = read_record(case)
    write_folder(tmp_path, record | {"shapes": {k: x for k, x in record["shapes"].items() if k not in lacking}})
    with pytest.raises((CheckpointError, ConfigError), match=r"linear_qkv|linear_fc1|output_layer|q_proj"):
        model_of(tmp_path)


# transformers 5's own names of experts, which `save_pretrained(save_original_format=False)` writes: of its module, and of the
# files' matrices that it joins, gate over up
_STACKED = {
    "mixtral": ("block_sparse_moe", "mlp", ("w1", "w3", "w2")),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo"), ("mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
    ),
}
_GRANITE_STACKED = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}


def stacked_values(case: str) -> dict[str, np.ndarray]:
    """Return the tensors of a case in transformers 5's own names."""
    shapes, values = read_record(case)["shapes"], {}
    if case.startswith("granite"):
        for name, shape in shapes.items():
            stem, _, old = name.partition("block_sparse_moe.")
            values[stem + "block_sparse_moe." + _GRANITE_STACKED[old] if old else name] = weight(name, tuple(shape))
    else:
        module, now, (gate, up, down) = _STACKED[case]
        for name, shape in shapes.items():
            if f"{module}.experts." not in name:
                values[name.replace(f"{module}.gate.", f"{now}.gate.")] = weight(name, tuple(shape))
        for i in range(3):
            old = f"model.layers.{i}.{module}.experts"
            if f"{old}.0.{gate}.weight" not in shapes:
                continue
            count = sum(name.startswith(f"{old}.") for name in shapes) // 3
            parts = {
                x: [weight(f"{old}.{e}.{x}.weight", tuple(shapes[f"{old}.{e}.{x}.weight"])) for e in range(count)]
                for x in (gate, up, down)
            }
            joined = [np.concatenate(pair) for pair in zip(parts[gate], parts[up])]
            values[f"model.layers.{i}.{now}.experts.gate_up_proj"] = np.stack(joined)
            values[f"model.layers.{i}.{now}.experts.down_proj"] = np.stack(parts[down])
    return values


def write_stacked(root: Path, case: str, values: dict[str, np.ndarray]) -> None:
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(read_record(case)["config"]))
    write_tensors(root, values)


@pytest.mark.parametrize("case", [*_STACKED, "granitemoe", "granitemoeshared"])
def test_experts_in_one_tensor_are_read_and_written_as_they_are_published(
    case: str, folders: dict[str, Path], tmp_path: Path
):
    write_stacked(tmp_path / "in", case, stacked_values(case))
    record = read_record(case)
    scores = scores_of(model_of(tmp_path / "in"), record["config"]["vocab_size"])
    assert (scores - torch.tensor(record["scores"], dtype=torch.float64)).abs().max() < 1e-10
    write_hf_folder(open_foreign(tmp_path / "in"), tmp_path / "out")
    assert read_tensors(tmp_path / "out") == read_tensors(folders[case])


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "granitemoe"])
def test_half_of_a_stacked_folder_is_refused(case: str, tmp_path: Path):
    """Downs that are missing; and experts that are there twice."""
    values, shapes = stacked_values(case), read_record(case)["shapes"]
    down = min(name for name in values if name.endswith("experts.down_proj"))
    write_stacked(tmp_path / "half", case, {name: x for name, x in values.items() if name != down})
    with pytest.raises((CheckpointError, ConfigError), match=r"linear_fc2"):
        model_of(tmp_path / "half")
    downs = ("w2.weight", "experts.0.down_proj.weight", "output_linear.weight")
    twice = {name: weight(name, tuple(shape)) for name, shape in shapes.items() if name.endswith(downs)}
    write_stacked(tmp_path / "twice", case, values | twice)
    with pytest.raises(CheckpointError, match=r"holds "):
        model_of(tmp_path / "twice")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("qwen2_moe", "model.layers.2.mlp.experts.3.down_proj.weight"),
        ("flex_olmo", "model.layers.0.mlp.experts.5.gate_proj.weight"),
    ],
)
def test_the_one_expert_of_another_shape_is_named_alone(case: str, name: str, tmp_path: Path):
    record = read_record(case)
    rows, columns = record["shapes"][name]
    write_folder(tmp_path / "in", record | {"shapes": record["shapes"] | {name: [rows - 1, columns]}})
    with pytest.raises(CheckpointError, match=rf"holds '{name}' of other shapes than config.json says") as told:
        open_foreign(tmp_path / "in")
    assert str(told.value).count(".experts.") == 1


@pytest.mark.parametrize(
    ("case", "key", "name"),
    [
        ("llama", "vocab_size", "model.embed_tokens.weight"),
        ("mixtral", "vocab_size", "model.embed_tokens.weight"),
        ("qwen2_moe", "shared_expert_intermediate_size", "model.layers.0.mlp.shared_expert.gate_proj.weight"),
        ("gpt2", "n_positions", "transformer.wpe.weight"),
        ("qwen3", "intermediate_size", "model.layers.0.mlp.gate_proj.weight"),
        ("bert", "intermediate_size", "bert.encoder.layer.0.intermediate.dense.weight"),
    ],
)
def test_a_config_of_another_size_than_the_tensors_is_told(case: str, key: str, name: str, tmp_path: Path):
    """Also in a conversion, which would write both as they are."""
    record = read_record(case)
    write_folder(tmp_path / "in", record | {"config": record["config"] | {key: record["config"][key] + 1}})
    with pytest.raises(CheckpointError, match=rf"holds '{name}' of other shapes than config.json says"):
        write_hf_folder(open_foreign(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_written_as_it_was_to_the_bit(case: str, folders: dict[str, Path], tmp_path: Path):
    """Its tensors in other files, the tokenizer's files as they are; and what was written is the same model."""
    (folders[case] / "tokenizer.json").write_bytes(b"{}\n")
    (folders[case] / "modeling_own.py").write_bytes(b"raise SystemExit")
    kind = write_hf_folder(open_foreign(folders[case]), tmp_path / "out", most_bytes=20_000)
    assert kind == read_record(case)["config"]["model_type"]
    assert read_tensors(tmp_path / "out") == read_tensors(folders[case])
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}\n"
    assert not list((tmp_path / "out").glob("*.py"))
    again = open_foreign(tmp_path / "out")
    assert again.manifest.tensors.keys() == open_foreign(folders[case]).manifest.tensors.keys()


def test_a_checkpoint_of_ours_is_written_as_the_first_family_that_can_say_it(folders: dict[str, Path], tmp_path: Path):
    """Trained weights go out from any layout's checkpoint, in a dtype of choice, here by the tool."""
    model = model_of(folders["llama"])
    mesh = single_rank_mesh()
    tensors = {f"model/{n}": placed_tensor(p.data, p.placement, mesh) for n, p in model.named_parameters()}
    state = {k: v for k, v in open_foreign(folders["llama"]).state.items() if k != "origin"}
    save_checkpoint(tmp_path / "ours", 3, tensors, state, ALONE)
    words = ["--load", str(tmp_path / "ours"), "--save-hf", str(tmp_path / "out"), "--dtype", "float32"]
    assert checkpoint_convert.main(words) == 0
    found, expected = read_tensors(tmp_path / "out"), read_tensors(folders["llama"])
    assert found.keys() == expected.keys()
    for name, (dtype, shape, data) in found.items():
        assert dtype == "F32" and shape == expected[name][1]
        assert np.array_equal(np.frombuffer(data, "<f4"), np.frombuffer(expected[name][2], "<f8")), name
    assert checkpoint_convert.main(words) == 2  # the folder is there
    assert checkpoint_convert.main([*words[:3], str(tmp_path / "no"), "--model-type", "gpt2"]) == 2


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_every_rank_reads_its_boxes_of_a_folder(case: str, folders: dict[str, Path]):
    """TP 2 x PP 2: each parameter is the part of the whole that its placement says."""
    whole = dict(model_of(folders[case]).named_parameters())

    def work(mesh):
        for name, mine in model_of(folders[case], mesh).named_parameters():
            for box, local in pieces(mine.placement, tuple(mine.shape), mesh):
                assert torch.equal(mine[slices(local)], whole[name][slices(box)]), name

    run_ranks({"tp": 2, "pp": 2}, work)


@pytest.mark.full
def test_a_run_starts_from_a_folder_and_what_it_saves_is_written_as_one(
    folders: dict[str, Path], tmp_path: Path, capsys
):
    """The folder gives the model's flags; a flag that says another model is refused."""
    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 25 --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu"
    words = f"--load {folders['llama']} --seq-length 16 --train-iters 1"
    run(f"{words} --save {tmp_path / 'run'}", tiny=rest.split())
    assert "loaded weights of iteration 0" in capsys.readouterr().out
    assert checkpoint_convert.main(["--load", str(tmp_path / "run"), "--save-hf", str(tmp_path / "out")]) == 0
    found, before = read_tensors(tmp_path / "out"), read_tensors(folders["llama"])
    assert found.keys() == before.keys() and all(found[name][:2] == before[name][:2] for name in found)
    assert found != before
    with pytest.raises(SystemExit):
        run(f"{words} --num-layers 2", tiny=rest.split())
    assert "num_layers: the checkpoint has 3, this run has 2" in capsys.readouterr().err
