"""tools/checkpoint_convert.py in both directions: to the bit, and in memory that does not grow with the model."""

import ctypes
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import read_record, read_tensors, weight, write_folder, write_folders, write_tensors
from said import tells
from whole_run import run

from megatron.convert import open_any, strided_reads_of_foreign_files
from megatron.convert.formats.safetensors_header import header_of
from megatron.convert.stream_foreign_checkpoint_to_ours import copy_checkpoint
from megatron.core.dist_checkpointing import load_whole_tensors, save_sharded
from tools import checkpoint_convert

MIB = 1 << 20
HIDDEN, FFN, LAYERS = 512, 2048, 6
FUSED = 2 * FFN * HIDDEN * 4  # bytes of gate and up: the largest tensor of a model of 102 MB
MARGIN = 8 * MIB  # buffers of 1 MiB, the code of a conversion, what the heap keeps


def converted(source: Path, *flags: str) -> int:
    return checkpoint_convert.main(["--load", str(source), *flags])


@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen2", "t5"])
def test_a_folder_becomes_a_checkpoint_and_the_same_folder_again(case: str, tmp_path: Path):
    """Rows that lie apart, columns, biases; its files are those of any checkpoint, with hashes."""
    source = write_folders(tmp_path, [case])[case]
    assert converted(source, "--save", str(tmp_path / "ours")) == 0
    manifest = json.loads((tmp_path / "ours" / "iter_0000000" / "manifest.json").read_text())
    assert all(piece["sha256"] for tensor in manifest["tensors"].values() for piece in tensor["pieces"])
    assert converted(tmp_path / "ours", "--save-hf", str(tmp_path / "again")) == 0
    assert read_tensors(tmp_path / "again") == read_tensors(source)
    assert converted(source, "--save", str(tmp_path / "ours")) == 2  # it is there
    assert converted(tmp_path / "ours", "--save", str(tmp_path / "other")) == 2  # it is one already


SPOILED = {
    "mixtral": ("model.layers.1.block_sparse_moe.gate.weight", [(1, 3)], float("nan")),
    "llama": ("model.layers.2.self_attn.o_proj.weight", [(0, 0), (5, 7)], float("inf")),
    "gpt_oss": ("model.layers.0.mlp.experts.gate_up_proj", [(3, 23, 31), (0, 0, 0), (2, 1, 4)], float("-inf")),
    "gpt2": ("transformer.h.1.mlp.c_fc.weight", [(2, 2)], float("nan")),  # which is stored transposed
}


@pytest.mark.parametrize("case", SPOILED)
def test_numbers_that_are_not_finite_are_converted_and_told_in_a_line(case: str, tmp_path: Path):
    record = read_record(case)
    values = {name: weight(name, tuple(shape)).copy() for name, shape in record["shapes"].items()}
    write_folder(tmp_path / "folder", record)
    notes: list[str] = []
    copy_checkpoint(open_any(tmp_path / "folder"), tmp_path / "sound", note=notes.append)
    assert notes == []

    name, places, value = SPOILED[case]
    for place in places:
        values[name][place] = value
    write_tensors(tmp_path / "folder", values)
    copy_checkpoint(open_any(tmp_path / "folder"), tmp_path / "spoiled", note=notes.append)
    (line,) = notes
    assert tells(line, f"WARNING: {name} {len(places)} {values[name].size}") and "\n" not in line
    whole = load_whole_tensors(tmp_path / "spoiled")
    assert sum(int((~x.isfinite()).sum()) for x in whole.values()) == len(places)


def test_a_run_takes_what_was_converted_as_it_takes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture):
    source = write_folders(tmp_path, ["llama"])["llama"]
    assert converted(source, "--save", str(tmp_path / "ours")) == 0
    words = "--mock-data --tokenizer-type NullTokenizer --vocab-size 25 --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu"
    words += " --seq-length 16 --train-iters 2 --log-interval 1"
    logs = []
    for start in (source, tmp_path / "ours"):
        run(f"--use-checkpoint-args --pretrained-checkpoint {start}", tiny=words.split())
        logs.append(re.findall(r"lm loss\S* (\S+)", capsys.readouterr().out))
    assert len(logs[0]) == 2 and logs[0] == logs[1]


@pytest.mark.full
def test_a_conversion_takes_memory_for_two_tensors_whatever_the_model(tmp_path: Path):
    """In a process of its own, after the imports: 102 MB of float32, whose largest tensor has 8 MiB."""
    for name, layers in (("tiny", 1), ("hf", LAYERS)):
        write_llama(tmp_path / name, 16 if name == "tiny" else HIDDEN, layers)
    paths = os.pathsep.join(
        str(Path(__file__).parents[3] / folder)
        for folder in ("", "tests/support", "tests/support/exchange", "tests/campaigns")
    )
    # Freed blocks go back to the system at once: what glibc keeps of them for later differs from run to run.
    env = os.environ | {"PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    ran = subprocess.run([sys.executable, __file__, tmp_path], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert read_tensors(tmp_path / "hf-out") == read_tensors(tmp_path / "hf")


def write_llama(folder: Path, hidden: int, layers: int) -> None:
    ffn, words = hidden * FFN // HIDDEN, 1000
    shapes = {
        "model.embed_tokens.weight": [words, hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [words, hidden],
    }
    for i in range(layers):
        norms = ("input_layernorm", "post_attention_layernorm")
        layer = {name: [hidden] for name in norms} | {f"self_attn.{x}_proj": [hidden, hidden] for x in "qkvo"}
        layer |= {"mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden], "mlp.down_proj": [hidden, ffn]}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    config = {"vocab_size": words, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    config |= {"model_type": "llama", "dtype": "float32", "num_attention_heads": 8, "max_position_embeddings": 64}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header_of({name: ("float32", tuple(shape)) for name, shape in shapes.items()}))
        for number, shape in enumerate(shapes.values()):
            file.write(np.arange(number, number + math.prod(shape), dtype="<f4"))


def measure(folder: Path) -> None:
    os.fsync, save_sharded._CHUNK, strided_reads_of_foreign_files._MOST_AT_ONCE = (lambda handle: None), MIB, MIB
    grown(folder, "tiny")  # the code itself is memory too
    there, back = grown(folder, "hf")
    assert there < MARGIN, f"folder to checkpoint: {there / MIB:.1f} MiB"
    assert FUSED // 2 < back < 2 * FUSED + MARGIN, f"checkpoint to folder: {back / MIB:.1f} MiB"


def grown(folder: Path, name: str) -> tuple[int, int]:
    """Bytes by which this process has grown at most in a conversion, and in the one back."""
    found, ours = [], folder / f"{name}-ours"
    for words in ((folder / name, "--save", ours), (ours, "--save-hf", folder / f"{name}-out")):
        ctypes.CDLL(None).malloc_trim(0)  # a heap that is free would hide what it takes
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        assert converted(words[0], words[1], str(words[2])) == 0
        found.append(resident("VmHWM") - before)
    return tuple(found)


def resident(field: str) -> int:
    """Bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
