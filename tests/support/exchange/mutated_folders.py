"""Hugging Face folders changed at random: python tests/support/exchange/mutated_folders.py [COUNT [SEED]]

Bytes of a header, of config.json and of the index are changed, and attacks are made that a hostile writer would make. A folder is
refused in bounded words, or has the values of the untouched one; nothing else is raised. Run as a command, the process may take no
more than 1 GiB of memory above what it has at the start, whatever sizes a file claims.
"""

import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from cases import read_record, write_folder  # noqa: E402

from megatron.convert import open_foreign  # noqa: E402
from megatron.core.base.dataclass_flags import ConfigError  # noqa: E402
from megatron.core.dist_checkpointing import CheckpointError  # noqa: E402
from megatron.core.dist_checkpointing.local_tensor import LocalTensor  # noqa: E402
from megatron.core.sharding.boxes import whole  # noqa: E402

FIRST, INDEX, CONFIG = "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by our names; of an untouched one, the expected ones."""
    checkpoint, found = open_foreign(folder), {}
    for name, record in checkpoint.manifest.tensors.items():
        found[name] = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        box = whole(record.shape)
        checkpoint.read_into({name: LocalTensor(found[name], record.shape, [(box, box)], is_writer=False)})
    return found


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """(the header, the values) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: object, values: bytes) -> None:
    """Write a safetensors file. header: an object, or its bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


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
    return text[: (at := draw.choice(digits))] + draw.choice(NUMBERS) + text[at + 1 :]


NUMBERS = [b"-1", b"1e9", b"NaN", b"0", b"99999999999999999999", b"null", b"7", b"1.5", b"1000000000", b"[]", b'"3"']
ODD = [-1, 0, 1.5, float("nan"), 1 << 40, 1 << 63, None, "4", [], [[]], {}, True, 10**9, 10**30]
ELSEWHERE = [
    "../elsewhere.safetensors",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "",
    "other.safetensors",
    CONFIG,
    7,
    None,
]


def _entry(folder: Path, draw: random.Random) -> None:
    """A tensor's dtype, shape or offsets replaced, or those of another tensor."""
    header, values = header_of(folder / FIRST)
    one, other = draw.sample([name for name in header if name != "__metadata__"], 2)
    key, kind = draw.choice(["dtype", "shape", "data_offsets"]), draw.randrange(3)
    if kind == 0:
        header[one][key] = draw.choice(ODD)
    elif kind == 1:
        header[one][key] = header[other][key]
    else:
        header[one]["shape"] = [*header[one]["shape"], draw.choice(ODD)]
    with_header(folder / FIRST, header, values)


def _length(folder: Path, draw: random.Random) -> None:
    """A header that claims another length, in a sparse file of up to a terabyte."""
    length, size = (
        draw.choice([0, 1, 1 << 20, 90 << 20, 3 << 30, 1 << 40, (1 << 64) - 1]),
        draw.choice([8, 5 << 30, 1 << 40]),
    )
    with (folder / FIRST).open("r+b") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(size)


def _index(folder: Path, draw: random.Random) -> None:
    """A tensor in another file, in none, or away from the folder; a wrong total."""
    index = json.loads((folder / INDEX).read_text())
    name = draw.choice(list(index["weight_map"]))
    kind = draw.randrange(4)
    if kind == 0:
        index["weight_map"][name] = draw.choice(ELSEWHERE)
    elif kind == 1:
        del index["weight_map"][name]
    elif kind == 2:
        index["metadata"] = {"total_size": draw.choice(ODD)}
    else:
        index["weight_map"] = draw.choice(ODD)
    (folder / INDEX).write_text(json.dumps(index))


def _setting(folder: Path, draw: random.Random) -> None:
    """A key of config.json with an odd value, or a key that nobody knows."""
    config = json.loads((folder / CONFIG).read_text())
    key = draw.choice([*config, "use_magic", "quantization_config", "auto_map"])
    (folder / CONFIG).write_text(json.dumps(config | {key: draw.choice(ODD)}))


def _doubled(folder: Path, draw: random.Random) -> None:
    """A key that an object names twice."""
    for name in draw.sample([CONFIG, INDEX], 1):
        text = (folder / name).read_text()
        (folder / name).write_text("{" + text[1 : text.index(",")] + "," + text[1:])


def _link(folder: Path, draw: random.Random) -> None:
    """A file of weights that is a link out of the folder, to nothing, to itself, a pipe or a folder."""
    path, kind = folder / FIRST, draw.randrange(5)
    path.rename(folder.parent / "elsewhere")
    if kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.mkdir()
    else:
        path.symlink_to((folder.parent / "elsewhere", "nowhere", FIRST)[kind])


def _pickled(folder: Path, draw: random.Random) -> None:
    """Pickles in place of the weights, under their name or their own."""
    pickle = b"\x80\x04cos\nsystem\nX\x05\x00\x00\x00false\x85R."
    if draw.randrange(2):
        (folder / FIRST).write_bytes(pickle)
        return
    for path in folder.glob("model*"):
        path.unlink()
    (folder / draw.choice(["pytorch_model.bin", "pytorch_model.bin.index.json"])).write_bytes(pickle)


def _bytes(name: str) -> Callable[[Path, random.Random], None]:
    def change(folder: Path, draw: random.Random) -> None:
        if name == FIRST:
            header, values = header_of(folder / FIRST)
            with_header(folder / FIRST, mutated(json.dumps(header).encode(), draw), values)
        else:
            (folder / name).write_bytes(mutated((folder / name).read_bytes(), draw))

    return change


ATTACKS = [_entry, _length, _index, _setting, _doubled, _link, _pickled]
CHANGES = [_bytes(FIRST), _bytes(CONFIG), _bytes(INDEX), _bytes(FIRST), _bytes(CONFIG), *ATTACKS]


def run(root: Path, count: int, seed: int) -> tuple[int, int]:
    """(folders that were refused, that loaded with the values of the untouched one)."""
    write_folder(root / "untouched", read_record("llama"), "F32")
    expected, draw, refused = tensors_of(root / "untouched"), random.Random(seed), 0
    for number in range(count):
        home = root / "changed"
        shutil.copytree(root / "untouched", home / "llama")
        change = CHANGES[number % len(CHANGES)]
        change(home / "llama", draw)
        try:
            found = tensors_of(home / "llama")
        except (CheckpointError, ConfigError) as error:
            assert len(str(error)) < 4000, error
            refused += 1
        else:
            assert found.keys() == expected.keys(), (number, change)
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), (number, change, name)
        shutil.rmtree(home)
    return refused, count - refused


def main(words: list[str]) -> None:
    count, seed = (*map(int, words), *(2000, 0)[len(words) :])
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as place:
        refused, loaded = run(Path(place), count, seed)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{refused} refused, {loaded} loaded, as they should; {grown:.0f} MiB more at most")


if __name__ == "__main__":
    main(sys.argv[1:])
