"""Token files: bytes against struct, reading against lists, every kind of damage."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from said import raises_telling

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import DTYPES, IndexedDataset, token_dtype
from megatron.core.storage.atomic_file import atomic_file, remove_abandoned

# Three documents: two sequences, none, one.
TOKENS, LENGTHS, DOCUMENTS = [7, 8, 9, 1, 2], [3, 0, 2], [0, 2, 2, 3]


def write_sample(prefix, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_document([7, 8, 9], [3, 0])
        writer.add_document([], [])
        writer.add_document([1, 2])
    return str(prefix)


def hand_made_index(code, itemsize):
    """The index of the sample from the format's table alone."""
    parts = [b"MMIDIDX\0\0", struct.pack("<Q", 1), bytes([code]), struct.pack("<Q", 3), struct.pack("<Q", 4)]
    parts += [struct.pack("<3i", *LENGTHS), struct.pack("<3q", 0, 3 * itemsize, 3 * itemsize)]
    return b"".join([*parts, struct.pack("<4q", *DOCUMENTS)])


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")]
)
def test_files_are_the_format_bit_for_bit(tmp_path, code, letter):
    prefix = write_sample(tmp_path / "a", DTYPES[code])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(f"<5{letter}", *TOKENS)
    assert (tmp_path / "a.idx").read_bytes() == hand_made_index(code, struct.calcsize(letter))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
    assert IndexedDataset(prefix).dtype == DTYPES[code]


def test_many_documents_at_once_equal_one_by_one(tmp_path, monkeypatch):
    for module in ("mmap_indexed_dataset", "indexed_dataset_writer"):
        monkeypatch.setattr(f"megatron.core.datasets.{module}.CHUNK_SEQUENCES", 2)  # several chunks in the index too
    write_sample(tmp_path / "a")
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_documents(np.array(TOKENS), np.array(LENGTHS), np.array([2, 0, 1]))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
    assert IndexedDataset(tmp_path / "b").sequence_lengths.tolist() == LENGTHS
    assert (writer.documents, writer.sequences, writer.tokens) == (3, 3, 5)


def test_reading_gives_back_what_was_written(tmp_path):
    dataset = IndexedDataset(write_sample(tmp_path / "a"))
    assert len(dataset) == 3
    assert dataset.document_count == 3
    assert dataset.document_indices.tolist() == DOCUMENTS
    assert [part.tolist() for part in dataset[:]] == [[7, 8, 9], [], [1, 2]]
    assert [part.tolist() for part in dataset[1:3]] == [[], [1, 2]]
    assert dataset[-1].tolist() == [1, 2]
    assert dataset[np.int32(0)].tolist() == [7, 8, 9]
    assert dataset.get(0, 1).tolist() == [8, 9]
    assert dataset.get(0, 1, 1).tolist() == [8]
    assert dataset.get(0, 3, 0).tolist() == []
    assert not dataset[0].flags.writeable


def test_a_file_without_tokens_can_be_read(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_document([])
    assert [part.tolist() for part in IndexedDataset(tmp_path / "a")[:]] == [[]]


def test_reading_past_the_end_is_refused(tmp_path):
    dataset = IndexedDataset(write_sample(tmp_path / "a"))
    for i in (3, -4):
        with pytest.raises(IndexError, match=rf"(?s){i}.*a\.idx.*3"):
            dataset[i]
    for offset, length in ((4, None), (0, 4), (-1, 1), (1, -1)):
        with pytest.raises(IndexError, match=r"(?s)0.*a\.idx.*3"):
            dataset.get(0, offset, length)
    with pytest.raises(ValueError, match="step 1, not 2"):
        dataset[::2]


def test_a_failed_writer_leaves_earlier_files_as_they_were(tmp_path):
    write_sample(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="stop"), IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1] * 100)
        raise RuntimeError("stop")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_output_is_invisible_until_it_is_complete(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1])
        assert all(name.endswith(".tmp") for name in os.listdir(tmp_path))
    with pytest.raises(RuntimeError, match="stop"), atomic_file(tmp_path / "b") as file:
        file.write(b"half")
        raise RuntimeError("stop")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


TOKENS_AND_REASONS = [
    ([65536], None, "65536 uint16"),
    ([-1, 5], None, "-1 5"),
    ([1, 2], [1], "2 1"),
    ([1, 2], [3, -1], "or a length is negative"),
    ([[1], [2]], None, "2 1"),
]


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), atomic_file(pipe):
        raise AssertionError
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(("tokens", "lengths", "reason"), TOKENS_AND_REASONS)
def test_documents_that_cannot_be_stored_are_refused(tmp_path, tokens, lengths, reason):
    with raises_telling(ValueError, reason), IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(tokens, lengths)
    assert os.listdir(tmp_path) == []


def test_overlong_sequences_and_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="complex64"):
        IndexedDatasetWriter(tmp_path / "a", np.complex64)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**31,), (0,))  # one byte of memory
    too_long = pytest.raises(ValueError, match="2147483648")
    with too_long, IndexedDatasetWriter(tmp_path / "a", np.uint8) as writer:
        writer.add_document(huge)


def replaced(content, at, new):
    return content[:at] + new + content[at + len(new) :]


INDEX = hand_made_index(8, 2)
DAMAGE = {
    "empty": (b"", "index of a token file"),
    "short header": (INDEX[:20], "index of a token file"),
    "magic": (replaced(INDEX, 0, b"X"), "index of a token file"),
    "version": (replaced(INDEX, 9, b"\2"), "version 2"),
    "dtype": (replaced(INDEX, 17, b"\x0b"), "unknown dtype code 11 \\(known are 1 to 8\\)"),
    "truncated": (INDEX[:-1], "101 bytes, but its header describes 102"),
    "too long": (INDEX + b"\0", "103 bytes, but its header describes 102"),
    "sequence count": (replaced(INDEX, 18, struct.pack("<Q", 2**60)), "copy is incomplete"),
    "multimodal": (INDEX + b"\0\0\0", "a mode for each sequence.*open it with multimodal=True"),
    "negative length": (replaced(INDEX, 34, struct.pack("<i", -3)), "sequence 0 has the negative length -3"),
    "start": (replaced(INDEX, 46 + 8, struct.pack("<q", 4)), "sequence 1 starts at byte 4"),
    "first document": (replaced(INDEX, 70, struct.pack("<q", 1)), "must rise from 0"),
    "falling documents": (replaced(INDEX, 78, struct.pack("<q", 3)), "must rise from 0"),
    "last document": (replaced(INDEX, 94, struct.pack("<q", 2)), "must rise from 0 to the number of sequences, 3"),
    "no documents": (replaced(INDEX, 26, struct.pack("<Q", 0))[:70], "must rise from 0"),
    "other data": (replaced(INDEX, 17, b"\4").replace(struct.pack("<q", 6), struct.pack("<q", 12)), "10 bytes, but"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path, kind):
    prefix = write_sample(tmp_path / "a")
    content, reason = DAMAGE[kind]
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.(idx|bin).*{reason}"):
        IndexedDataset(prefix)


def test_tokens_that_do_not_match_the_index_are_refused(tmp_path):
    prefix = write_sample(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(b"123456789")
    with pytest.raises(ValueError, match=r"(?s)a\.bin.*9.*a\.idx.*10"):
        IndexedDataset(prefix)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx"):
        IndexedDataset(tmp_path / "nothing")
    prefix = write_sample(tmp_path / "a")
    os.remove(f"{prefix}.bin")
    with pytest.raises(FileNotFoundError, match=r"a\.bin"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, np.uint16), (65499, np.uint16), (65500, np.int32), (1 << 20, np.int32)]
)
def test_dtype_follows_the_vocabulary(vocab, dtype):
    assert token_dtype(vocab) is dtype


def test_a_multimodal_file_says_the_mode_of_each_sequence(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16, multimodal=True) as writer:
        writer.add_document([7, 8, 9], [3, 0], [0, 1])
        writer.add_documents([1, 2], [2], [0, 1], [5])
    assert (tmp_path / "a.idx").read_bytes() == hand_made_index(8, 2) + bytes([0, 1, 5])
    dataset = IndexedDataset(tmp_path / "a", multimodal=True)
    assert dataset.sequence_modes.tolist() == [0, 1, 5]
    assert dataset[0].tolist() == [7, 8, 9]
    write_sample(tmp_path / "b")
    with pytest.raises(ValueError, match=r"b\.idx"):
        IndexedDataset(tmp_path / "b", multimodal=True)
    with (
        pytest.raises(ValueError, match="1 sequences"),
        IndexedDatasetWriter(tmp_path / "c", np.uint16, multimodal=True) as writer,
    ):
        writer.add_document([1])


def test_reads_without_a_map_give_the_same_tokens(tmp_path):
    prefix = write_sample(tmp_path / "a")
    mapped, read = IndexedDataset(prefix), IndexedDataset(prefix, mmap=False)
    assert [part.tolist() for part in read[:]] == [part.tolist() for part in mapped[:]]
    assert read.get(0, 1, 1).tolist() == [8]


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_file_cut_anywhere_is_refused(tmp_path, ending):
    prefix = write_sample(tmp_path / "a")
    content = (tmp_path / f"a{ending}").read_bytes()
    for size in range(len(content)):
        (tmp_path / f"a{ending}").write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"a\{ending}"):
            IndexedDataset(prefix)


@pytest.mark.full
def test_any_flipped_bit_of_the_index_is_refused_or_changes_no_token(tmp_path):
    """What may pass: a signed for an unsigned dtype, and a document border, which says nothing of the tokens."""
    prefix = write_sample(tmp_path / "a")
    passed = set()
    for at in range(len(INDEX)):
        for bit in range(8):
            (tmp_path / "a.idx").write_bytes(replaced(INDEX, at, bytes([INDEX[at] ^ 1 << bit])))
            try:
                dataset = IndexedDataset(prefix)
            except ValueError:
                continue
            passed.add(at)
            assert [part.tolist() for part in dataset[:]] == [[7, 8, 9], [], [1, 2]]
    assert passed <= {17, 78, 86}


KILLED_WRITER = """
import os, signal, sys
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.storage.atomic_file import atomic_file
with IndexedDatasetWriter(sys.argv[1] + "/o", "u2"), atomic_file(sys.argv[1] + "/x-description.txt"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def temporary_files(folder):
    return sorted(path.name.rsplit(".", 2)[0] for path in folder.glob("*.tmp"))


@pytest.mark.full
def test_files_of_killed_writers_are_removed_by_the_next_and_those_at_work_stay(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED_WRITER, tmp_path], cwd=Path(__file__).parents[3])
    of_writer = ["o.bin", "o.idx.documents", "o.idx.lengths", "o.idx.modes"]
    assert temporary_files(tmp_path) == [*of_writer, "x-description.txt"]
    with IndexedDatasetWriter(tmp_path / "o", np.uint16) as at_work:
        assert temporary_files(tmp_path) == [*of_writer, "x-description.txt"], "its own, and what has another name"
        with IndexedDatasetWriter(tmp_path / "o", np.uint16) as second, atomic_file(tmp_path / "y"):
            remove_abandoned(tmp_path)
            assert temporary_files(tmp_path) == sorted([*of_writer, *of_writer, "y"])
            second.add_document([1])
        at_work.add_document([1, 2])
    assert IndexedDataset(tmp_path / "o")[0].tolist() == [1, 2]
    assert temporary_files(tmp_path) == []


def test_a_file_of_another_host_is_abandoned_after_a_day(tmp_path):
    for age in (0, 23, 25):
        (tmp_path / f"{age}.elsewhere-1-ab.tmp").touch()
        os.utime(tmp_path / f"{age}.elsewhere-1-ab.tmp", (time.time() - 3600 * age,) * 2)
    remove_abandoned(tmp_path)
    assert [path.name[:2] for path in sorted(tmp_path.iterdir())] == ["0.", "23"]
    remove_abandoned(tmp_path / "missing")
