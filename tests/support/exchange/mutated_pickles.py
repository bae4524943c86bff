"""Megatron-LM's files with bytes changed: python tests/support/exchange/mutated_pickles.py [COUNT [SEED [classic | dist]]]

Two kinds of change: of any byte but those of tensors, where the zip's own checksums must notice; and of the pickle, with a checksum
that fits, which a hostile writer would make. What loads after the first has the values of the untouched files. Nothing but the two
errors of a folder is raised, each in bounded words, and nothing that a file names is called.

dist: of a folder in torch_dist, whose .metadata has no checksum: every byte of it, and all of the files but those of tensors.
"""

import random
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

import dist_files  # noqa: E402
import megatron_files  # noqa: E402
from mutated_folders import tensors_of  # noqa: E402

from megatron.convert import open_foreign  # noqa: E402
from megatron.core.base.dataclass_flags import ConfigError  # noqa: E402
from megatron.core.dist_checkpointing import CheckpointError  # noqa: E402


def records_of(data: bytes) -> list[tuple[str, int, int, int]]:
    """(name, start and end of the content, place in the directory) of each record of a zip."""
    at, found = struct.unpack("<I", data[-6:-2])[0], []
    while data[at : at + 4] == b"PK\x01\x02":
        size, names, extras = struct.unpack("<IHH", data[at + 24 : at + 32])
        (header,) = struct.unpack("<I", data[at + 42 : at + 46])
        begin = header + 30 + sum(struct.unpack("<HH", data[header + 26 : header + 30]))
        found.append((data[at + 46 : at + 46 + names].decode(), begin, begin + size, at))
        at += 46 + names + extras
    return found


def with_pickle(data: bytes, change) -> bytes:
    """The file with `data.pkl` changed to another of the same length, and the checksum of that."""
    begin, end, at = next((b, e, at) for name, b, e, at in records_of(data) if name.endswith("/data.pkl"))
    made = change(data[begin:end])
    assert len(made) == end - begin
    check = struct.pack("<I", zlib.crc32(made))
    data = data[:begin] + made + data[end : end + 4] + check + data[end + 8 :]
    return data[: at + 16] + check + data[at + 20 :]


def mutated(text: bytes, draw: random.Random, places: list[int]) -> bytes:
    """One to four bytes changed: by a bit, to any value, or to another instruction's."""
    made = bytearray(text)
    for _ in range(draw.randrange(1, 5)):
        at = draw.choice(places)
        made[at] = draw.choice([made[at] ^ (1 << draw.randrange(8)), draw.randrange(256), draw.choice(text[:200])])
    return bytes(made)


def run(root: Path, count: int, seed: int) -> tuple[int, int]:
    """(mutations that were refused, that loaded)."""
    folder = megatron_files.write(root, "gpt2", tp=2, version=1.0)
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    data, expected = path.read_bytes(), tensors_of(root)
    of_tensors = [range(b, e) for name, b, e, _ in records_of(data) if "/data/" in name]
    others = sorted({*range(len(data))} - {i for span in of_tensors for i in span})
    draw, refused = random.Random(seed), 0
    for number in range(count):
        checked = number % 2 == 0
        if checked:
            made = mutated(data, draw, others)
        else:
            made = with_pickle(data, lambda text: mutated(text, draw, [*range(len(text))]))
        path.write_bytes(made)
        try:
            found = tensors_of(root)
        except (CheckpointError, ConfigError) as error:
            assert len(str(error)) < 4000, error
            refused += 1
            continue
        for name, tensor in found.items() if checked else ():
            assert torch.equal(tensor, expected[name]), name
    return refused, count - refused


def run_dist(root: Path, count: int, seed: int) -> tuple[int, int]:
    """`run`, of a folder in torch_dist: no change gives another tensor."""
    folder = dist_files.write_dist(root, "llama", tp=2)
    expected, draw, refused = tensors_of(root), random.Random(seed), 0
    files = {name: (folder / name).read_bytes() for name in (".metadata", "common.pt", "__0_0.distcp", "__0_1.distcp")}
    places = {name: [*range(len(data))] for name, data in files.items()}
    for piece in (piece for x in open_foreign(root).manifest.tensors.values() for piece in x.pieces):
        of_tensor = range(piece.offset, piece.offset + piece.nbytes)
        places[piece.file] = [i for i in places[piece.file] if i not in of_tensor]
    for _ in range(count):
        name = draw.choice([".metadata", ".metadata", *files])
        (folder / name).write_bytes(mutated(files[name], draw, places[name]))
        try:
            for tensor, values in tensors_of(root).items():
                assert torch.equal(values, expected[tensor]), (name, tensor)
        except (CheckpointError, ConfigError) as error:
            assert len(str(error)) < 4000, error
            refused += 1
        (folder / name).write_bytes(files[name])
    return refused, count - refused


if __name__ == "__main__":
    count, seed = (*map(int, sys.argv[1:3]), *(2000, 0)[len(sys.argv[1:3]) :])
    with tempfile.TemporaryDirectory() as place:
        work = run_dist if sys.argv[3:] == ["dist"] else run
        print("{} refused, {} loaded, as they should".format(*work(Path(place), count, seed)))
