"""Folders of other projects that are damaged or hostile: one clear line, never a crash, never a wrong tensor."""

import json
import struct
from pathlib import Path

import mutated_folders
import pytest
from cases import read_record, write_folder
from mutated_folders import header_of, with_header

from megatron.convert import open_foreign
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "llama", read_record("llama"), "F32")
    return tmp_path / "llama"


def changed(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def refused(folder: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        open_foreign(folder)
    return str(error.value)


def entry(key: str, value: object):
    """A change of one tensor's entry in the header."""

    def change(folder: Path) -> None:
        header, values = header_of(folder / FIRST)
        name = next(name for name in header if name != "__metadata__")
        header[name][key] = value
        with_header(folder / FIRST, header, values)

    return change


def index_says(name: str):
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        path.write_text(json.dumps(index))

    return change


def linked_out(folder: Path) -> None:
    (folder / FIRST).rename(folder.parent / "elsewhere")
    (folder / FIRST).symlink_to(folder.parent / "elsewhere")


def pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")


def two_dtypes(folder: Path) -> None:
    changed(folder / "config.json", "dtype", "float32")
    changed(folder / "config.json", "torch_dtype", "bfloat16")


HOSTILE = {
    "a header of gigabytes": (lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 1 << 40) + b"{}"), "header"),
    "no header": (lambda f: (f / FIRST).write_bytes(b"abc"), "header"),
    "deep nesting": (lambda f: with_header(f / FIRST, b"[" * 200_000, b""), "header"),
    "overlapping offsets": (entry("data_offsets", [4, 4 + 31 * 24 * 4]), "begins at byte"),
    "another size": (entry("data_offsets", [0, 5]), "5 bytes, which do not fit F32"),
    "a shape that is no number": (entry("shape", ["NaN"]), "shape"),
    "a shape below zero": (entry("shape", [-24]), "shape"),
    "a shape beyond all bounds": (entry("shape", [1 << 63, 1 << 63]), "shape"),
    "a dtype of quantized values": (entry("dtype", "F8_E4M3"), "quantized"),
    "a dtype that is none": (entry("dtype", "X" * 5000), "not a known dtype"),
    "a path out of the folder": (index_says("../elsewhere.safetensors"), "not the name of a file"),
    "an absolute path": (index_says("/etc/passwd"), "not the name of a file"),
    "a file that is not there": (index_says("other.safetensors"), "is not a file"),
    "a link out of the folder": (linked_out, "outside of the folder"),
    "pickled weights": (pickled, "is a pickle"),
    "an unknown kind": (lambda f: changed(f / "config.json", "model_type", "mystery"), "model_type is 'mystery'"),
    "an unknown kind with an infinite number": (
        lambda f: (
            changed(f / "config.json", "model_type", "mystery"),
            changed(f / "config.json", "limit", float("inf")),
        ),
        "model_type is 'mystery'",
    ),
    "infinite layers": (
        lambda f: changed(f / "config.json", "num_hidden_layers", float("inf")),
        "num_hidden_layers is inf",
    ),
    "an unknown field": (lambda f: changed(f / "config.json", "use_magic", True), "use_magic"),
    "an unknown scaling": (lambda f: changed(f / "config.json", "rope_parameters", {"rope_type": "x"}), "rope_type"),
    "a dtype that is not trained in": (lambda f: changed(f / "config.json", "dtype", "int8"), "dtype is 'int8'"),
    "a dtype in another spelling": (
        lambda f: changed(f / "config.json", "torch_dtype", "torch.float16"),
        "torch_dtype",
    ),
    "two dtypes": (two_dtypes, "dtype says float32"),
    "two scalings in one": (
        lambda f: changed(f / "config.json", "rope_scaling", {"type": "linear", "rope_type": "dynamic", "factor": 2.0}),
        "rope_type 'dynamic' or type 'linear'",
    ),
    "no name of a scaling": (lambda f: changed(f / "config.json", "rope_scaling", {"rope_type": ""}), "rope_type"),
    "NaN layers": (lambda f: changed(f / "config.json", "num_hidden_layers", float("nan")), "NaN is not JSON"),
    "too many layers": (lambda f: changed(f / "config.json", "num_hidden_layers", 1 << 50), "num_hidden_layers"),
    "layers beyond memory": (lambda f: changed(f / "config.json", "num_hidden_layers", 10**9), "from 1 to 4096"),
    "quantized weights": (lambda f: changed(f / "config.json", "quantization_config", {"bits": 4}), "quantization"),
    "an encoder": (lambda f: changed(f / "config.json", "is_encoder_decoder", True), "is_encoder_decoder"),
    "another width": (lambda f: changed(f / "config.json", "num_key_value_heads", 3), "other shapes"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_in_a_line(case: str, folder: Path):
    change, told = HOSTILE[case]
    change(folder)
    said = refused(folder)
    assert told in said and len(said) < 1500, said


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"type": "linear", "rope_type": "linear", "factor": 2.0}},  # as both transformers write it
        {"rope_parameters": {"type": None, "rope_type": "linear", "factor": 2.0}},
        {"dtype": None, "torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
    ],
)
def test_one_thing_may_be_said_twice(said: dict, folder: Path):
    for key, value in said.items():
        changed(folder / "config.json", key, value)
    settings = open_foreign(folder).state["config"]["transformer"]
    assert settings.get("bf16") if "dtype" in said else '"linear"' in settings["rope_scaling"]


def test_a_quantization_that_is_null_says_nothing(folder: Path):
    changed(folder / "config.json", "quantization_config", None)
    assert open_foreign(folder).state["config"]


def test_code_of_a_folder_is_not_run(folder: Path):
    (folder / "configuration_own.py").write_text("raise SystemExit")
    changed(folder / "config.json", "auto_map", {"AutoConfig": "configuration_own.Own"})
    assert "never run" in open_foreign(folder).warning


def test_a_head_that_differs_from_the_table_it_is_tied_with_is_refused(folder: Path):
    changed(folder / "config.json", "tie_word_embeddings", True)
    assert "differs from" in refused(folder)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("case", ["t5", "t5-gated"])
def test_a_word_table_of_one_stack_that_differs_from_the_shared_one_is_refused(case: str, stack: str, tmp_path: Path):
    """transformers computes with it; here both stacks have one table."""
    record, name = read_record(case), f"{stack}.embed_tokens.weight"
    write_folder(tmp_path, record | {"shapes": record["shapes"] | {name: record["shapes"]["shared.weight"]}}, "F32")
    assert f"{name} and shared.weight" in refused(tmp_path)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_changed_folders_never_give_a_wrong_tensor(seed: int, tmp_path: Path):
    """Whatever still loads has the values of the file; nothing but the two errors is raised."""
    count = 300 if seed else 48
    refused, loaded = mutated_folders.run(tmp_path, count, seed)
    assert refused + loaded == count and refused > count / 2
