"""Checkpoints of Megatron-LM that are damaged or hostile: one clear line, never a crash, and nothing of a file is ever called."""

import io
import os
import pickle
import runpy
import struct
import sys
import warnings
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import dist_files
import megatron_files
import mutated_pickles
import pytest
import torch

from megatron.convert import open_any
from megatron.convert.formats import pickle_as_data, torch_save_tensor_offsets
from megatron.convert.formats.pickle_as_data import PickleError, read_pickle
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError

RANK = Path("iter_0000007") / "mp_rank_01" / "model_optim_rng.pt"


class Calls:
    """An object whose pickle asks for a call."""

    def __init__(self, function: Any, *arguments: Any):
        self.asked = function, arguments

    def __reduce__(self):
        return self.asked


def written(root: Path, **options: Any) -> Path:
    megatron_files.write(root, "gpt2", **{"tp": 2, "version": 2.0} | options)
    return root


def refused(root: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        open_any(root)
    assert len(str(error.value)) < 2000
    return str(error.value)


def with_value(make: Any) -> Any:
    """A folder whose second rank's values are changed by `make`."""
    return lambda root: written(root, change=lambda rank, stage, values: make(values) if rank else None)


def in_model(name: str, value: Any) -> Any:
    return with_value(lambda values: values["model"]["language_model"]["encoder"].__setitem__(name, value))


def zip_again(change: Any) -> Any:
    """A folder whose second rank's zip is made anew; change: (name, data) -> (name, data, compression) of each record."""

    def make(root: Path) -> None:
        path = written(root) / RANK
        with zipfile.ZipFile(path) as old:
            records = [change(name, old.read(name)) for name in old.namelist()]
        with zipfile.ZipFile(path, "w") as new:
            for name, data, compression in records:
                with warnings.catch_warnings(action="ignore"):  # of a name that is there twice
                    new.writestr(zipfile.ZipInfo(name), data, compression)

    return make


def bytes_changed(find: Any, new: bytes) -> Any:
    """A folder with the bytes of the second rank's file changed at the place that find(data) gives."""

    def make(root: Path) -> None:
        path = written(root) / RANK
        data = path.read_bytes()
        at = find(data)
        path.write_bytes(data[:at] + new + data[at + len(new) :])

    return make


def moved(root: Path) -> None:
    """A record's header is said to be 16 bytes longer: those of the checksum and sizes that follow the content."""
    path = written(root) / RANK
    data = path.read_bytes()
    at = data.find(b"/data/3FB") + 7  # the record's name, and its extra field
    at = data.rfind(b"PK\3\4", 0, at) + 28
    (length,) = struct.unpack("<H", data[at : at + 2])
    path.write_bytes(data[:at] + struct.pack("<H", length + 16) + data[at + 2 :])


def strided(values: dict) -> None:
    values["model"]["language_model"]["encoder"]["final_layernorm.weight"] = torch.zeros(1).as_strided((24,), (0,))


def linked_out(root: Path) -> None:
    path = written(root / "theirs") / RANK
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")


def latest_says(text: str) -> Any:
    return lambda root: (written(root) / "latest_checkpointed_iteration.txt").write_text(text)


def args(**more: Any) -> Any:
    return lambda root: written(root, **more)


def titan(root: Path) -> None:
    root.mkdir()
    dist_files.write_dcp(root, {"tok_embeddings.weight": torch.ones(3, 2)})


def deepspeed(root: Path) -> None:
    (root / "global_step5").mkdir(parents=True)
    (root / "latest").write_text("global_step5")
    (root / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")


def mixture(root: Path) -> None:
    folder = written(root) / "iter_0000007"
    (folder / "mp_rank_00").rename(folder / "mp_rank_00_000_001")


def distributed(change: Any = lambda state: None, after: Any = lambda folder: None, **options: Any) -> Any:
    """A folder in torch_dist; change: of its tensors before they are written, after: of its files."""
    return lambda root: after(dist_files.write_dist(root, "llama", **{"tp": 2} | options, change=change))


def metadata(old: bytes, new: bytes) -> Any:
    """Metadata with bytes replaced by as many."""

    def make(folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        assert old in data and len(old) == len(new)
        (folder / ".metadata").write_bytes(data.replace(old, new))

    return make


def metadata_that_calls(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(os.system, "echo run > ran"), 4))


def chunk_gone(state: dict) -> None:
    """One rank's rows of the word table are not written."""
    table = state["embedding.word_embeddings.weight"]
    table.pieces.pop(torch.Size([16, 0]))


def another_length(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-9])


def nested(depth: int) -> bytes:
    return b"\x80\x02)" + b"\x85" * depth + b"."


def spoiled_model(values: dict) -> None:
    values["model"] = [values["model"]]


def universal(states: str):
    def write(root: Path) -> None:
        (root / "zero").mkdir(parents=True)
        (root / states).write_bytes(b"")

    return write


HOSTILE = {
    "a command": (in_model("x", Calls(os.system, "echo run > ran")), "posix.system"),
    "eval": (in_model("x", Calls(eval, "open('ran', 'w')")), "__builtin__.eval"),
    "a compressed record": (zip_again(lambda n, d: (n, d, zipfile.ZIP_DEFLATED)), "compressed"),
    "two records of one name": (zip_again(lambda n, d: (n.replace("data/1", "data/0"), d, 0)), "two records"),
    "no pickle": (zip_again(lambda n, d: (n.replace("data.pkl", "data.bin"), d, 0)), "without data.pkl"),
    "another order of bytes": (zip_again(lambda n, d: (n, b"big" if "byteorder" in n else d, 0)), "byte order"),
    "a pickle that was changed": (bytes_changed(lambda d: d.find(b"dense") + 2, b"N"), "checksum"),
    "a comment after the end": (bytes_changed(len, b"comment"), "comment"),
    "records beyond the file": (
        bytes_changed(lambda d: d.rfind(b"PK\6\6") + 48, b"\xff" * 8),
        "directory is impossible",
    ),
    "no file of torch": (bytes_changed(lambda d: 0, b"GIF89a"), "not a file of torch.save"),
    "a header that moves its content": (moved, "at the position that the zip directory says"),
    "strides of zero": (with_value(strided), "not row-major"),
    "an object for a tensor": (in_model("x", Namespace(a=1)), "which is not a tensor"),
    "a name without a place": (in_model("layers.0.moe.weight", torch.zeros(3)), "no tensor of this name"),
    "a list for a model": (with_value(spoiled_model), "which is not a tensor"),
    "another version": (with_value(lambda v: v.update(checkpoint_version=1.0)), "the first rank's of 2.0"),
    "an unknown version": (with_value(lambda v: v.update(checkpoint_version=7)), "checkpoint_version 7"),
    "ranks that differ": (in_model("final_layernorm.bias", torch.zeros(24, dtype=torch.float64)), "its ranks differ"),
    "several dtypes": (in_model("layers.0.mlp.dense_h_to_4h.bias", torch.zeros(48)), "dtype differs between ranks"),
    "a rank that is not there": (lambda root: (written(root) / RANK).parent.rename(root / "away"), "2 tensor-parallel"),
    "a rank's file that is not there": (lambda root: (written(root) / RANK).unlink(), "holds none of"),
    "a link out of the folder": (linked_out, "outside of the folder"),
    "a path for an iteration": (latest_says("../../etc"), "not the number of an iteration"),
    "no args": (
        args(change=lambda r, s, values: values.pop("args")),
        "args are missing; they contain the model's settings",
    ),
    "experts of a smaller width inside": (args(moe_latent_size=8), "moe_latent_size (8)"),
    "a folder that lacks expert-parallel ranks": (mixture, "expert-parallel rank 0"),
    "NaN": (args(layernorm_epsilon=float("nan")), "finite number"),
    "a text for a number": (args(num_layers="3"), "num_layers"),
    "more layers than files": (args(num_layers=4), "have 3 layers"),
    "sizes beyond bounds": (args(hidden_size=1 << 50), "hidden_size"),
    "more heads than features": (args(num_attention_heads=7), "num_attention_heads"),
    "torch_dist: a command": (distributed(after=metadata_that_calls), "posix.system"),
    "torch_dist: a path": (distributed(after=metadata(b"__0_0.distcp", b"../../x.dist")), "not the name of a file"),
    "torch_dist: a class that calls": (distributed(after=metadata(b"\x04Size", b"\x04load")), "not consist of numbers"),
    "torch_dist: no metadata": (distributed(after=lambda f: (f / ".metadata").write_bytes(b"")), "ends"),
    "torch_dist: a chunk is gone": (distributed(chunk_gone), "do not cover"),
    "torch_dist: a short file": (distributed(after=another_length), "__0_0.distcp"),
    "torch_dist: a tensor of no model": (
        distributed(lambda s: s.update({"x.weight": torch.ones(3)})),
        "no tensor of this name",
    ),
    "torch_dist: a layer less": (distributed(num_layers=4), "3 layers, and args say 4"),
    "torch_dist: no args": (
        distributed(after=lambda f: (f / "common.pt").unlink()),
        "nor common_state, which contain the model's settings",
    ),
    "torchtitan's": (titan, "convert_to_hf.py"),
    "DeepSpeed's": (deepspeed, "zero_to_fp32.py"),
    "DeepSpeed's, universal, of ZeRO 2": (universal("mp_rank_00_model_states.pt"), "a universal checkpoint"),
    "DeepSpeed's, universal, of ZeRO 3": (
        universal("zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "a universal checkpoint",
    ),
}


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:.*torch.distributed.checkpoint.format_utils:RuntimeWarning"
)  # it is imported already
def test_the_command_for_tensors_of_torchtitan_does_what_is_said(tmp_path: Path, monkeypatch):
    """In this process, by what runs a module under -m: another would import torch first."""
    titan(tmp_path / "step-5")
    module, *words = command = ["torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    assert f"-m {' '.join(command)}" in refused(tmp_path / "step-5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *words, "step-5", "file"])
    runpy.run_module(module, run_name="__main__")
    assert torch.load(tmp_path / "file")["tok_embeddings.weight"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_a_line_and_nothing_runs(case: str, tmp_path: Path, monkeypatch):
    change, told = HOSTILE[case]
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "r")
    root = tmp_path / "r" / "theirs" if case == "a link out of the folder" else tmp_path / "r"
    assert told in refused(root)
    assert not (tmp_path / "ran").exists()


def test_a_call_of_what_is_allowed_is_not_made(tmp_path: Path, monkeypatch):
    """A name of a module that checkpoints name stays a name: beside the model it is read, and nothing comes of it."""
    monkeypatch.chdir(tmp_path)
    found, _ = read_pickle(pickle.dumps({"a": Calls(torch.save, 1, "ran")}, 2))
    assert not (tmp_path / "ran").exists()
    assert str(found["a"].constructor) == "torch.serialization.save" and found["a"].arguments == (1, "ran")


BAD_PICKLES = {
    "nothing": (b"", "ends"),
    "no stop": (b"\x80\x02N", "ends"),
    "an instruction of no checkpoint": (b"\x80\x02S'x'\n.", "instruction"),
    "an extension's code": (b"\x80\x02\x82\x01.", "instruction"),
    "protocol 9": (b"\x80\x09N.", "protocol 9"),
    "a value that is not there": (b"\x80\x02R.", "not a valid pickle"),
    "below a mark": (b"\x80\x02N(0.", "takes a value from an empty stack"),
    "a memory that is not there": (b"\x80\x02h\x07.", "not a valid pickle"),
    "a number of a megabyte": (b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b".", "whole number"),
    "a text of gigabytes": (b"\x80\x02X\xff\xff\xff\xffabc.", "ends too early"),
    "a text beyond memory": (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "ends too early"),
    "a module by another name": (b"\x80\x02cos\x0csystem\n)R.", "never ends"),
    "a name that is no text": (b"\x80\x04K\x01K\x02\x93.", "no text"),
    "a call of a number": (b"\x80\x02K\x01)R.", "calls an object that is not a class or function"),
    "a key that is a list": (b"\x80\x02}]K\x01s.", "a dictionary key of type list"),
    "a key that is a deep tuple": (b"\x80\x02})" + b"\x85" * 90000 + b"K\x01s.", "a dictionary key of type tuple"),
    "a state for a list": (b"\x80\x02]}b.", "sets the state"),
    "an append to a dictionary": (b"\x80\x02}Na.", "not a list"),
    "items of a list": (b"\x80\x02]NNs.", "not a dictionary"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", BAD_PICKLES)
def test_a_bad_pickle_is_refused_in_a_line(case: str):
    data, told = BAD_PICKLES[case]
    with pytest.raises(PickleError, match=told) as error:
        read_pickle(data)
    assert len(str(error.value)) < 300


def test_the_work_of_a_pickle_is_bounded(monkeypatch):
    monkeypatch.setattr(pickle_as_data, "_MOST_STEPS", 1000)
    assert read_pickle(nested(900))[1] == len(nested(900))
    with pytest.raises(PickleError, match="more than 1000 instructions"):
        read_pickle(nested(1100))


def test_a_pickle_larger_than_any_needs_is_not_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch_save_tensor_offsets, "MOST_BYTES", 500)
    assert "at most 500 can be read" in refused(written(tmp_path))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_an_unpickler_gives(protocol: int):
    shared = [1, -1, 255, 256, 65536, -(1 << 40), 1 << 100, 1.5, "text", "\u00e4\u20ac", b"bytes", None, True]
    value = {"a": shared, "b": (shared, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), 5: {"c": {}}, "long": "x" * 300}
    data = pickle.dumps(value, protocol)
    if protocol == 2:  # in which bytes are a call, of a text in latin-1
        shared[10], expected = "", {**value}
        data = pickle.dumps(expected, 2)
    found, length = read_pickle(data + b"rest")
    assert found == value and length == len(data)
    assert found["a"] is found["b"][0]


def test_tensors_of_a_torch_file_lie_where_it_is_said(tmp_path: Path):
    """Views of one storage, each dtype, one element and none; in the zip and in the format before."""
    base = torch.arange(24.0).view(4, 6)
    made = {"base": base, "rows": base[1:3], "one": torch.tensor(3.5), "none": torch.zeros(0, 3)}
    made |= {str(kind): torch.ones(3).to(kind) for kind in (torch.bfloat16, torch.half, torch.long, torch.uint8)}
    made["parameter"] = torch.nn.Parameter(torch.ones(2, 1))
    for zipped in (True, False):
        torch.save(made, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        data, file = (
            (tmp_path / "x.pt").read_bytes(),
            torch_save_tensor_offsets.read_torch_file(tmp_path / "x.pt", "x.pt"),
        )
        for name, x in made.items():
            place = file.tensor(file.values[name])
            assert place.shape == tuple(x.shape) and place.dtype == str(x.dtype).removeprefix("torch.")
            values = io.BytesIO()
            values.write(data[place.start : place.start + place.nbytes])
            expected = x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
            assert values.getvalue() == expected, name
        assert file.tensor(5) is None


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_mutated_files_never_give_a_wrong_tensor_nor_a_crash(seed: int, tmp_path: Path):
    """`python tests/support/exchange/mutated_pickles.py 2000` does more of them."""
    refused, loaded = mutated_pickles.run(tmp_path, 20 if seed == 0 else 250, seed)
    assert refused > loaded


@pytest.mark.full
def test_changed_bytes_of_torch_dist_never_give_another_tensor(tmp_path: Path):
    """`python tests/support/exchange/mutated_pickles.py 2000 0 dist` does more of them."""
    refused, loaded = mutated_pickles.run_dist(tmp_path, 30, 1)
    assert refused > loaded
