"""Folders of other projects that are damaged or hostile: one clear line, never a crash, never a wrong tensor."""

import json
import random
import struct
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.boxes import whole
from megatron.core.checkpoint import CheckpointError
from megatron.core.checkpoint.local_tensor import LocalTensor
from megatron.core.config import ConfigError
from megatron.core.interchange import open_foreign

sys.path.append(str(Path(__file__).parent.parent / "exchange"))
from cases import read_record, write_folder

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "llama", read_record("llama"), "F32")
    return tmp_path / "llama"


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: object, values: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


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


HOSTILE = {
    "a header of gigabytes": (lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 1 << 40) + b"{}"), "header"),
    "no header": (lambda f: (f / FIRST).write_bytes(b"abc"), "header"),
    "deep nesting": (lambda f: with_header(f / FIRST, b"[" * 200_000, b""), "header"),
    "overlapping offsets": (entry("data_offsets", [4, 4 + 31 * 24 * 4]), "begins at byte"),
    "another size": (entry("data_offsets", [0, 5]), "bytes for F32"),
    "a shape that is no number": (entry("shape", ["NaN"]), "shape"),
    "a shape below zero": (entry("shape", [-24]), "shape"),
    "a shape beyond all bounds": (entry("shape", [1 << 63, 1 << 63]), "shape"),
    "a dtype of quantized values": (entry("dtype", "F8_E4M3"), "quantized"),
    "a dtype that is none": (entry("dtype", "X" * 5000), "no dtype"),
    "a path out of the folder": (index_says("../elsewhere.safetensors"), "no name of a file"),
    "an absolute path": (index_says("/etc/passwd"), "no name of a file"),
    "a file that is not there": (index_says("other.safetensors"), "is no file"),
    "a link out of the folder": (linked_out, "outside of the folder"),
    "pickled weights": (pickled, "is a pickle"),
    "an unknown kind": (lambda f: changed(f / "config.json", "model_type", "mystery"), "model_type 'mystery'"),
    "an unknown field": (lambda f: changed(f / "config.json", "use_magic", True), "use_magic"),
    "an unknown scaling": (lambda f: changed(f / "config.json", "rope_parameters", {"rope_type": "x"}), "rope_type"),
    "NaN layers": (lambda f: changed(f / "config.json", "num_hidden_layers", float("nan")), "NaN is not JSON"),
    "too many layers": (lambda f: changed(f / "config.json", "num_hidden_layers", 1 << 50), "num_hidden_layers"),
    "quantized weights": (lambda f: changed(f / "config.json", "quantization_config", {"bits": 4}), "quantization"),
    "an encoder": (lambda f: changed(f / "config.json", "is_encoder_decoder", True), "is_encoder_decoder"),
    "another width": (lambda f: changed(f / "config.json", "num_key_value_heads", 3), "other shapes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_in_a_line(case: str, folder: Path):
    change, told = HOSTILE[case]
    change(folder)
    said = refused(folder)
    assert told in said and len(said) < 1500, said


def test_code_of_a_folder_is_not_run(folder: Path):
    (folder / "configuration_own.py").write_text("raise SystemExit")
    changed(folder / "config.json", "auto_map", {"AutoConfig": "configuration_own.Own"})
    assert "never run" in open_foreign(folder).warning


def test_a_head_that_differs_from_the_table_it_is_tied_with_is_refused(folder: Path):
    changed(folder / "config.json", "tie_word_embeddings", True)
    assert "differs from" in refused(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by our names; of an untouched one, the expected ones."""
    checkpoint, found = open_foreign(folder), {}
    for name, record in checkpoint.manifest.tensors.items():
        found[name] = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        box = whole(record.shape)
        checkpoint.read_into({name: LocalTensor(found[name], record.shape, [(box, box)], is_writer=False)})
    return found


def mutated(text: bytes, draw: random.Random) -> bytes:
    """A byte changed, some left out or doubled, or a number replaced."""
    at, kind = draw.randrange(len(text)), draw.randrange(4)
    if kind == 0:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at + draw.randrange(1, 9) :]
    if kind == 2:
        return text[:at] + text[at : at + draw.randrange(1, 30)] + text[at:]
    digits = [i for i, byte in enumerate(text) if 48 <= byte < 58]
    at = draw.choice(digits)
    return (
        text[:at] + draw.choice([b"-1", b"1e9", b"NaN", b"0", b"99999999999999999999", b"null", b"7"]) + text[at + 1 :]
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_mutated_headers_and_configs_never_give_a_wrong_tensor(seed: int, folder: Path):
    """Whatever still loads has the values of the file; nothing but the two errors is raised."""
    expected = tensors_of(folder)
    header, values = header_of(folder / FIRST)
    original, config = json.dumps(header).encode(), (folder / "config.json").read_bytes()
    draw, loaded = random.Random(seed), 0
    count = 40 if seed == 0 else 300
    for number in range(count):
        in_header = number % 2
        with_header(folder / FIRST, mutated(original, draw) if in_header else original, values)
        (folder / "config.json").write_bytes(config if in_header else mutated(config, draw))
        try:
            found = tensors_of(folder)
        except (CheckpointError, ConfigError) as error:
            assert len(str(error)) < 4000
            continue
        loaded += 1
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
    assert loaded < count / 2
