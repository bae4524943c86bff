"""A manifest that is not what was written, or was written to do harm, is refused, and soon."""

import contextlib
import hashlib
import json
import math
from itertools import combinations, product

import pytest
import torch
from small_checkpoints import refused, save_one

from megatron.core.dist_checkpointing import manifest_format as disk, open_checkpoint
from megatron.core.sharding.boxes import intersect, slices


def sealed(raw):
    """The text of an edited manifest whose hash is right again: what lies beyond the hash must be checked too."""
    body = json.dumps({key: value for key, value in raw.items() if key != "sha256"})[:-1]
    return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def edited(*keys, value):
    def edit(raw):
        at = raw
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        return raw

    return edit


def two_pieces(*boxes):
    def edit(raw):
        piece = raw["tensors"]["w"]["pieces"][0]
        volume = [(b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) for b in boxes]
        raw["tensors"]["w"]["pieces"] = [piece | {"box": b, "nbytes": 4 * n} for b, n in zip(boxes, volume)]
        return raw

    return edit


W, P = ("tensors", "w"), ("tensors", "w", "pieces", 0)
EDITS = [
    (edited("format", value="other"), "other megatron-boxes"),
    (edited("version", value=3), "version 3 1 2"),
    (edited("byte_order", value="big little"), "big little"),
    (edited("iteration", value=-4), "iteration -4"),
    (edited("iteration", value=True), "iteration"),
    (edited("state", value=[]), "state"),
    (edited("files", value={"rank_00000.bin": "48"}), "rank_00000.bin"),
    (edited("files", value={"../rank_00000.bin": 48}), "../rank_00000.bin"),
    (edited("files", value={"/etc/passwd": 48}), "/etc/passwd"),
    (edited("files", value={"a..b": 48}), "a..b .."),
    (edited(*P, "file", value="../../x"), "0:3 0:4 48 ../../x"),
    (edited(*P, "offset", value=1), "49 rank_00000.bin 48"),
    (edited(*P, "offset", value=-64), "w offset -64"),
    (edited(*P, "nbytes", value=44), "0:3 0:4 44 float32"),
    (edited(*P, "sha256", value="xyz"), "xyz sha256"),
    (edited(*P, "box", value=[[0, 3], [0, 5]]), "0:3 0:5 3 4"),
    (edited(*P, "box", value=[[0, 3]]), "0:3 3 4"),
    (edited(*P, "box", value=[[0, 3], [4]]), "w 4 2 0"),
    (edited(*W, "dtype", value="object"), "w object float64 float32 bfloat16"),
    (edited(*W, "shape", value=[3, -4]), "w shape -4 0"),
    (edited(*W, "pieces", value=[3]), "w box"),
    (edited(*W, "pieces", value=[]), "w 3 4 0 12"),
    (two_pieces([[0, 2], [0, 4]], [[1, 3], [0, 4]]), "0:2 0:4 rank_00000.bin 1:3"),
    (two_pieces([[0, 3], [0, 2]], [[0, 3], [1, 3]]), "w 0:3 0:2"),
    (two_pieces([[0, 2], [0, 4]], [[2, 3], [0, 4]]), "rank_00000.bin"),
    (edited("files", value={"rank_00000.bin": 49}), "rank_00000.bin 1 49"),
    (edited("files", value={"rank_00000.bin": 48, "x": 9}), "x 9"),
    (edited("files", value={"a" * 300: 48}), "255"),
    (edited(*W, "shape", value=[1] * 100), "w 100 64"),
    (edited(*W, "shape", value=[3, 2**70]), "w shape 1180591620717411303424"),
    (edited(*P, "offset", value=2**70), "w offset 64"),
    (two_pieces([[0, 2], [0, 4]], [[2, 3], [0, 3]]), "11 12"),
]


@pytest.mark.full
@pytest.mark.parametrize("edit, said", EDITS, ids=range(len(EDITS)))
def test_every_value_of_a_manifest_is_checked(tmp_path, edit, said):
    path = save_one(tmp_path) / disk.MANIFEST
    path.write_text(sealed(edit(json.loads(path.read_text()))))
    with refused("manifest.json " + said):
        open_checkpoint(tmp_path)


DAMAGES = [
    (lambda text: text[: len(text) // 2], "JSON"),
    (lambda text: "[]", "megatron-boxes"),
    (lambda text: "[" * 100000, "JSON"),
    (lambda text: text.replace(": 0.25", ": 0.26"), "sha256"),
    (lambda text: text.replace(": 0.25", ": NaN"), "JSON NaN"),
    (lambda text: text.replace('{"lr"', '{"lr": 1, "lr"'), "JSON"),
    (lambda text: text.replace('"lr"', '"\udcff"'), "utf-8"),
]


@pytest.mark.parametrize("change, said", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_manifest_is_refused(tmp_path, change, said):
    path = save_one(tmp_path, state={"lr": 0.25}) / disk.MANIFEST
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with refused("manifest.json " + said):
        open_checkpoint(tmp_path)


def test_no_byte_of_a_manifest_can_change(tmp_path):
    text = (save_one(tmp_path, state={"lr": 0.25}) / disk.MANIFEST).read_text()
    assert disk.parse_manifest(text, "m") == open_checkpoint(tmp_path).manifest
    for at in range(len(text)):
        for other in (text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :], text[:at], text[:at] + text[at + 1 :]):
            with refused("m"):
                disk.parse_manifest(other, "m")


@pytest.mark.parametrize("name", [disk.LATEST, f"iter_0000001/{disk.MANIFEST}"])
def test_a_file_without_an_end_is_refused_unread(tmp_path, name):
    save_one(tmp_path)
    with open(tmp_path / name, "r+b") as file:
        file.truncate(1 << 40)
    with refused(name):
        open_checkpoint(tmp_path)


def manifest_of(*boxes, shape):
    """Of one tensor of bytes, its pieces end to end in one file."""
    size, pieces = 0, []
    for box in boxes:
        nbytes = math.prod(stop - start for start, stop in box)
        pieces.append(disk.Piece(tuple(box), "f", size, nbytes, "0" * 64))
        size += -(-nbytes // 64) * 64
    return disk.Manifest(
        1, {}, {"f": pieces[-1].offset + pieces[-1].nbytes}, {"w": disk.TensorRecord("uint8", shape, tuple(pieces))}
    )


@pytest.mark.full
@pytest.mark.parametrize("last, said", [((0, 1), None), ((0, 2), "pieces that overlap"), (None, "has gaps")])
def test_thousands_of_pieces_are_checked_without_comparing_all(last, said, monkeypatch):
    """Every one reaches past all that come after it in one dimension, and beside them in the other."""
    compared = []
    monkeypatch.setattr(disk, "intersect", lambda *boxes: compared.append(1) or intersect(*boxes))
    k = 2000
    rows = [((i, k), (k - i, k - i + 1)) for i in range(k)]
    rest = [((0, i), (k - i, k - i + 1)) for i in range(1, k)]
    boxes = [*rows, *rest, *([((0, k), last)] if last else [])]
    with refused(said) if said else contextlib.nullcontext():
        disk.check_complete(manifest_of(*boxes, shape=(k, k + 1)), "m")
    assert len(compared) < 10**6


def test_boxes_fill_a_tensor_exactly_if_every_element_lies_in_one():
    spans = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 3)]
    for boxes in [*combinations(product(spans, spans), 2), *combinations(product(spans, [(0, 1), (1, 2), (0, 2)]), 3)]:
        shape = (3, 3) if len(boxes) == 2 else (3, 2)
        count = torch.zeros(shape)
        for box in boxes:
            count[slices(box)] += 1
        record = manifest_of(*boxes, shape=shape).tensors["w"]
        assert disk.is_covered_exactly_once(record) == bool(count.eq(1).all()), boxes


def test_the_sweep_finds_what_all_pairs_find():
    spans = [(0, 2), (1, 3), (2, 4)]
    boxes = list(product(spans, spans))
    for pair in [*product(boxes, boxes), ((), ())]:  # the last: one number, twice
        pieces = tuple(disk.Piece(box, "", 0, 0, "") for box in pair)
        assert bool(disk._first_overlap(pieces)) == (intersect(*pair) is not None), pair
