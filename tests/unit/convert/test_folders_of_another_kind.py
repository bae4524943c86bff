"""What looks like a model and is none is named for what it is, with what to give instead."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from cases import read_record, write_folder
from said import tells
from token_files import write

from megatron.convert import model_from_hf_config, open_any
from megatron.convert.families.read_and_write_hf_config import settings_of
from megatron.convert.formats.torch_save_tensor_offsets import read_torch_file
from megatron.convert.open_hf_safetensors_folder import open_hf_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lfs_pointer import LFS_POINTER
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.training.arguments.command_line import parse_args
from tools import checkpoint_inspect

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c\nsize 1234\n"
)
LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8},
    **{"num_attention_heads": 1, "max_position_embeddings": 8},
}
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_pointers_of_git_lfs_are_named_wherever_a_file_is_read(folder: Path):
    for name in ("model.safetensors", "tokenizer.json", "vocab.txt", "tokenizer.model", "rank.pt"):
        (folder / name).write_bytes(POINTER)
    readers = [
        lambda: open_any(folder),
        lambda: build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder))),
        lambda: build_tokenizer(TokenizerConfig("BertWordPieceCase", vocab_file=str(folder / "vocab.txt"))),
        lambda: read_torch_file(folder / "rank.pt", "rank.pt"),
    ]
    for read in readers:
        with pytest.raises((ConfigError, CheckpointError, ValueError), match=LFS_POINTER):
            read()
    (folder / "config.json").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=LFS_POINTER):
        model_from_hf_config(folder)
    prefix = write(folder / "data", [[[1, 2, 3]]], np.uint16)
    Path(f"{prefix}.idx").write_bytes(POINTER)
    with pytest.raises(ValueError, match=LFS_POINTER):
        IndexedDataset(prefix)


def refusals(path: Path) -> list[str]:
    """What the converter, --hf-config, --load and checkpoint_inspect say of a folder."""
    told = []
    for read in (
        lambda: open_any(path),
        lambda: model_from_hf_config(path),
        lambda: checkpoint_inspect.opened(str(path), None),
    ):
        with pytest.raises(ConfigError) as error:
            read()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("beside", [False, True])
def test_an_adapter_of_peft_is_named_with_its_base(beside: bool, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if beside:  # some tools copy the base's config.json
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        with pytest.raises(ConfigError, match=r"an adapter of PEFT of 'org/base'.*merge_and_unload"):
            open_any(tmp_path)
        return
    assert all("an adapter of PEFT of 'org/base'" in told for told in refusals(tmp_path))


def test_a_hub_cache_and_a_model_in_it_are_named_with_a_snapshot(tmp_path: Path):
    model = tmp_path / "hub/models--org--base"
    snapshot = model / "snapshots/0123abc"
    for path in (snapshot, model / "refs", model / "blobs"):
        path.mkdir(parents=True)
    assert all(f"a cache of the hub; give a snapshot in it: {snapshot}" in told for told in refusals(tmp_path / "hub"))
    assert all(f"in the hub's cache; give a snapshot in it: {snapshot}" in told for told in refusals(model))
    os.rmdir(snapshot)
    assert all("without a snapshot" in told for told in refusals(model))


def test_a_folder_of_another_project_is_inspected(folder: Path, capsys):
    """Two of them are compared by their bytes: they hold no hashes."""
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({TABLE: {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}).encode()
    for root, value in ((folder, 0), (other, 1)):
        data = np.full((8, 8), value, np.float32).tobytes()
        (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert checkpoint_inspect.main(["--load", str(folder), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "1 tensors of float32, 64 elements" in said and "hold no hashes" in said
    assert checkpoint_inspect.main(["--load", str(folder), "--compare", str(other)]) == 1
    assert "64 of 64 elements differ" in capsys.readouterr().out
    assert checkpoint_inspect.main(["--load", str(folder), "--compare", str(folder)]) == 0


MOVED = "is no longer at"


def test_a_tokenizer_that_has_moved_with_its_folder_is_found_or_what_to_give_is_said(tmp_path: Path):
    """At a resume from the run's own checkpoint; by --pretrained-checkpoint, or named with the flag to give."""
    from whole_run import run

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    first = tmp_path / "first"
    first.mkdir()
    (first / "vocab.txt").write_text("\n".join(words) + "\n")
    bert = f"--tokenizer-type BertWordPieceCase --vocab-file {first}/vocab.txt --make-vocab-size-divisible-by 8"
    tiny = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --micro-batch-size 1"
    run(f"{bert} --train-iters 1 --save {tmp_path}/run --lr 1 --eval-iters 0 --device cpu", tiny=tiny.split())
    first.rename(tmp_path / "second")
    rest = f"--mock-data --micro-batch-size 1 --lr 1 --train-iters 2 --load {tmp_path}/run --use-checkpoint-args"
    with pytest.raises(
        ConfigError, match=rf"{MOVED} {first}/vocab.txt; give --vocab-file .* or --pretrained-checkpoint"
    ):
        parse_args(rest.split())
    config = parse_args([*rest.split(), "--pretrained-checkpoint", str(tmp_path / "second")]).config
    assert config.tokenizer.vocab_file == f"{tmp_path}/second/vocab.txt"
    config = parse_args([*rest.split(), "--vocab-file", f"{tmp_path}/second/vocab.txt"]).config
    assert config.tokenizer.vocab_file == f"{tmp_path}/second/vocab.txt"


def stacked(record: dict) -> dict[str, list[int]]:
    """The shapes of a per-expert folder as transformers 5 names and writes them, from the record's sizes alone."""
    config, shapes = record["config"], {}
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    for name, shape in record["shapes"].items():
        layer, of_experts, _ = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if of_experts:
            shapes[f"{layer}.experts.gate_up_proj"] = [config["num_local_experts"], 2 * width, hidden]
            shapes[f"{layer}.experts.down_proj"] = [config["num_local_experts"], hidden, width]
        else:
            shapes[layer] = shape
    return shapes


@pytest.mark.parametrize("form", ["as published", "stacked"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("more", [-1, 1, 0])
def test_another_number_of_experts_than_the_config_says_is_told_in_one_line(
    family: str, more: int, form: str, tmp_path: Path
):
    record = read_record(family)
    has = record["config"]["num_local_experts"]
    shapes = stacked(record) if form == "stacked" and family != "gpt_oss" else record["shapes"]
    write_folder(tmp_path, record | {"shapes": shapes, "config": record["config"] | {"num_local_experts": has + more}})
    if more == 0:
        open_hf_folder(tmp_path)
        return
    with pytest.raises(CheckpointError) as error:
        open_hf_folder(tmp_path)
    assert tells(error.value, f"{has} experts config.json {has + more}")
    assert len(str(error.value).splitlines()) == 1


WRONG = {"gate_up_proj": 1, "down_proj": 2, "gate_up_proj_bias": 1, "down_proj_bias": 1}  # a dimension of each


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", WRONG)
def test_stacked_experts_of_another_width_than_the_config_says_are_told_by_their_name(
    family: str, name: str, tmp_path: Path
):
    record = read_record(family)
    shapes = dict(record["shapes"] if family == "gpt_oss" else stacked(record))
    wrong = [known for known in shapes if known.endswith(f"layers.1.mlp.experts.{name}")]
    if not wrong:
        pytest.skip("this family has no biases")
    shape = list(shapes[wrong[0]])
    shape[WRONG[name]] += 2
    shapes[wrong[0]] = shape
    write_folder(tmp_path, record | {"shapes": shapes})
    with pytest.raises(CheckpointError) as error:
        open_hf_folder(tmp_path)
    assert tells(error.value, f"{wrong[0]} config.json") and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_packed_values_are_no_damage(dtype: str, tmp_path: Path):
    """Fetching them again would give the same."""
    record = read_record("llama")
    write_folder(tmp_path, record)
    (file,) = (x for x in tmp_path.glob("*.safetensors") if b'"model.norm.weight"' in x.read_bytes())
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + length :])
    with pytest.raises(CheckpointError) as error:
        open_hf_folder(tmp_path)
    assert tells(error.value, f"model.norm.weight {dtype} give the unquantized model")
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("mixtral", {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}),
        ("mixtral", {"layer_types": ["full_attention"] * 3, "shared_expert_intermediate_size": 0}),
        ("olmoe", {"layer_types": ["full_attention"] * 3, "qkv_bias": False}),
        ("gpt_neox", {"mlp_bias": False, "lm_head_bias": False}),
        ("gemma", {"use_sliding_window": False, "n_shared_experts": 0}),
    ],
)
def test_a_key_of_another_class_that_says_there_is_no_such_part_changes_nothing(case: str, keys: dict):
    config = read_record(case)["config"]
    if "sliding_window" in config and "layer_types" in keys:
        config = config | {"sliding_window": None}
    assert not keys.keys() & config.keys()
    assert settings_of(config | keys, case) == settings_of(config, case)
    for key in keys:
        other = ["full_attention", "sliding_attention", "full_attention"] if key == "layer_types" else 3
        with pytest.raises(ConfigError, match=key):
            settings_of(config | {key: other}, case)


def test_layers_without_a_window_contradict_the_window_of_a_class():
    config = read_record("mixtral")["config"] | {"sliding_window": 5}
    with pytest.raises(ConfigError, match="layer_types"):
        settings_of(config | {"layer_types": ["full_attention"] * 3}, "mixtral")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"decoder_sparse_step": 5}, "decoder_sparse_step is 5"),
        ({"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers is [0, 1, 2]"),
    ],
)
def test_what_leaves_no_layer_with_experts_is_named(keys: dict, named: str):
    config = read_record("qwen2_moe")["config"] | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    with pytest.raises(ConfigError) as error:
        settings_of(config | keys, "qwen2_moe")
    assert named in str(error.value) and "none has experts" in str(error.value)
