"""Inputs of every kind, pieces that outlive a kill, damage of every kind: right tokens or a clear error, never less."""

import gzip
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from preprocessed_pieces import check_mutations, expected, numbered
from said import tells
from token_files import NULL, contents

from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools import preprocess_data
from tools.preprocessing import pieces, sources
from tools.preprocessing.encode import Encoder
from tools.preprocessing.sources import Chunk, read_pieces

ROOT = Path(__file__).resolve().parents[3]


def preprocess(*arguments):
    return preprocess_data.main([*map(str, arguments), *NULL])


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 1 KB, so that a small input has many."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 1 << 10)


def zstd(text):
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(text)


PACKED = {"plain": (".jsonl", bytes), "gz": (".jsonl.gz", gzip.compress), "zst": (".jsonl.zst", zstd)}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_files_in_folders(tmp_path, small_pieces, kind):
    ending, pack = PACKED[kind]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    lines = numbered(300).splitlines(keepends=True)
    (tmp_path / "in" / f"b{ending}").write_bytes(pack(b"".join(lines[200:])))
    first = [pack(b"".join(part)) for part in (lines[:80], lines[80:200])]
    (tmp_path / "in" / f"a{ending}").write_bytes(b"".join(first))  # two streams in one file, as cat makes them
    (tmp_path / "in" / "deep" / f"c{ending}").write_bytes(pack(b""))
    (tmp_path / "in" / "other.txt").write_bytes(b"no JSON")
    assert preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "o", "--append-eod") == 0
    assert contents(tmp_path / "o_text_document") == expected(300)
    assert sorted(os.listdir(tmp_path)) == ["in", "o_text_document.bin", "o_text_document.idx"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_file_that_was_cut_off_or_changed_is_refused(tmp_path, small_pieces, capsys, kind):
    ending, pack = PACKED[kind]
    whole, path = pack(numbered(300)), tmp_path / f"a{ending}"
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 0x10
    for content in (whole[: len(whole) // 2], whole[:-1], whole[:3], bytes(changed), whole + b"trailing nonsense"):
        path.write_bytes(content)
        assert preprocess("--input", path, "--output-prefix", tmp_path / "o", "--on-error", "skip") == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"preprocess_data: {path} is ")
        assert not list(tmp_path.glob("o_*"))


def test_parquet_rows_are_documents(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["1 2", "3", None, "4"], "n": [1, 2, 3, 4], "parts": [["5"], ["6", "7"], [], ["8"]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    arguments = ["--input", tmp_path, "--output-prefix", tmp_path / "o", "--json-keys", "text", "parts"]
    assert preprocess(*arguments, "--on-error", "skip") == 0
    assert contents(tmp_path / "o_text_document") == [[[1, 2]], [[3]], [[4]]]
    assert contents(tmp_path / "o_parts_document") == [[[5]], [[6], [7]], [[8]]]
    assert tells(capsys.readouterr().err, "a.parquet:3 text")
    assert preprocess("--input", tmp_path, "--output-prefix", tmp_path / "o", "--json-keys", "txt") == 1
    assert tells(capsys.readouterr().err, "txt text n parts")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-9])
    assert preprocess(*arguments) == 1
    assert tells(capsys.readouterr().err, "a.parquet")


@pytest.mark.parametrize(("ending", "package"), [("jsonl.zst", "zstandard"), ("parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys, ending, package):
    (tmp_path / f"a.{ending}").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    assert preprocess("--input", tmp_path / f"a.{ending}", "--output-prefix", tmp_path / "o") == 1
    assert f"pip install {package}" in capsys.readouterr().err


def test_standard_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(numbered(50))))
    arguments = ["--output-prefix", tmp_path / "o", "--append-eod", "--log-interval", 10]
    assert preprocess("--input", "-", *arguments) == 0
    assert contents(tmp_path / "o_text_document") == expected(50)
    assert tells(capsys.readouterr().err, "MB")
    assert preprocess("--input", "-", "-", *arguments) == 1
    assert "(-)" in capsys.readouterr().err


def test_sentences_become_sequences(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "1 2\\n\\n3"}\n{"text": ["4\\n\\n5 6", "7"]}\n{"text": ""}\n')
    arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--split-sentences"]
    assert preprocess(*arguments, "--partitions", 1, "--keep-newlines", "--append-eod") == 0
    assert contents(tmp_path / "o_text_sentence") == [[[1, 2], [3, 100]], [[4], [5, 6], [7, 100]], []]
    assert preprocess(*arguments, "--lang", "german") == 2
    assert tells(capsys.readouterr().err, "--lang --sentence-splitter")


def test_pieces_hold_every_line_once(tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(sources, "_PIECES_A_SIZE", 3)
    rng = random.Random(0)
    texts = [bytes(rng.choice(b"ab\n\r{") for _ in range(rng.randrange(9000))) for _ in range(12)] + [b"", b"x" * 5000]
    files = [str(tmp_path / f"{i}") for i in range(len(texts))]
    for path, text in zip(files, texts):
        Path(path).write_bytes(text)
    found = list(read_pieces(files, []))
    assert [piece.number for piece in found] == list(range(len(found)))
    assert [len(p.chunks[0].text) >= 1 for p in found] == [True] * len(found)
    assert found[-1].position == sum(map(len, texts))
    for path, text in zip(files, texts):
        chunks = [chunk for piece in found for chunk in piece.chunks if chunk.path == path]
        assert b"".join(chunk.text for chunk in chunks) == text
        for chunk in chunks:
            before = text.index(chunk.text) if chunk.first == 1 else None
            assert chunk.first == 1 or chunk.text in b"".join(text.splitlines(keepends=True)) or before is None
        assert all(chunk.text.endswith(b"\n") for chunk in chunks[:-1])
        ends = list(itertools.accumulate(chunk.text.count(b"\n") for chunk in chunks))
        assert [chunk.first for chunk in chunks] == [1 + n for n in [0, *ends][: len(chunks)]]


@pytest.mark.parametrize("kind", PACKED)
def test_a_line_without_end_is_refused(tmp_path, small_pieces, capsys, kind):
    """Such as a small packed file may hold: 3 MB of zeros are 3 KB of gzip."""
    ending, pack = PACKED[kind]
    source = tmp_path / f"a{ending}"
    source.write_bytes(pack(b"1\n" + bytes(3 << 20)))
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", "--on-error", "skip", "--max-line-mb"]
    assert preprocess(*arguments, 1) == 1
    assert tells(capsys.readouterr().err, f"{source}:2 1 MB --max-line-mb")
    assert preprocess(*arguments, 0) == 2
    assert tells(capsys.readouterr().err, "--max-line-mb 0 1")


def test_want_of_memory_is_one_line(tmp_path, monkeypatch, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(numbered(3))

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(preprocess_data, "finish_piece", fails)
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o") == 1
    error = capsys.readouterr().err
    assert "--workers" in error and "--max-line-mb" in error and error.count("\n") == 1


def test_after_a_bad_line_only_its_piece_is_done_again(tmp_path, small_pieces, capsys):
    lines = numbered(400).splitlines(keepends=True)
    source, arguments = tmp_path / "a.jsonl", ["--output-prefix", tmp_path / "o", "--append-eod"]
    source.write_bytes(b"".join([*lines[:390], b'{"text": "x"}\n', *lines[391:]]))
    assert preprocess("--input", source, *arguments) == 1
    assert f"{source}:391: NullTokenizer reads" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "o.pieces"]
    source.write_bytes(b"".join(lines))
    assert preprocess("--input", source, *arguments) == 0
    done = capsys.readouterr().err
    total = len(list(read_pieces([str(source)], [])))
    assert any(f"{total - missing} of {total} " in done for missing in (1, 2))
    assert contents(tmp_path / "o_text_document") == expected(400)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "o_text_document.bin", "o_text_document.idx"]


def test_pieces_of_other_settings_are_not_used(tmp_path, small_pieces, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(numbered(400) + b"{\n")
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", "--on-error"]
    assert preprocess(*arguments, "fail", "--append-eod") == 1
    assert preprocess(*arguments, "skip") == 0
    assert "earlier run" not in capsys.readouterr().err
    assert contents(tmp_path / "o_text_document") == [[document[0][:3]] for document in expected(400)]


def test_a_damaged_piece_is_named(tmp_path, small_pieces, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(numbered(400) + b"{\n")
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", "--append-eod"]
    assert preprocess(*arguments) == 1
    source.write_bytes(numbered(400))
    victim = sorted((tmp_path / "o.pieces").glob("*.piece"))[2]
    whole = victim.read_bytes()
    for content in (whole[:-1], whole[:20], b"", b"\xff" * 40):
        victim.write_bytes(content)
        capsys.readouterr()
        assert preprocess(*arguments) == 1
        assert victim.name in capsys.readouterr().err
        assert not list(tmp_path.glob("o_*"))
    victim.unlink()
    assert preprocess(*arguments) == 0
    assert contents(tmp_path / "o_text_document") == expected(400)


def test_two_runs_do_not_write_one_output(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(numbered(5))
    with pieces.PieceStore(str(tmp_path / "o.pieces"), "").claimed():
        assert preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o") == 1
    assert "another run" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


# A run of the tool in a process of its own that kills itself at the COUNT-th call of NAME, before or after it.
KILLED = """
import os, signal, sys
from megatron.core.storage.atomic_file import UnpublishedFile
from tools import preprocess_data
from tools.preprocessing import sources
sources._CHUNK_BYTES = 1 << 10
owner, name, count, after = UnpublishedFile if sys.argv[1] == "storage" else preprocess_data, sys.argv[2], int(sys.argv[3]), sys.argv[4]
original, calls = getattr(owner, name), 0
def dying(*arguments, **options):
    global calls
    calls += 1
    if calls == count and after == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*arguments, **options)
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, dying)
sys.exit(preprocess_data.main(sys.argv[5:]))
"""


MOMENTS = [
    ("preprocess_data", "write_piece", 1, "before"),  # nothing done
    ("preprocess_data", "write_piece", 4, "after"),  # between pieces
    ("storage", "publish", 3, "before"),  # a piece is written but has no name yet
    ("preprocess_data", "append_piece", 2, "after"),  # within the merge
    ("storage", "publish", 10, "before"),  # all merged, nothing published: 9 pieces came first
    ("storage", "publish", 10, "after"),  # tokens published, the index not
    ("preprocess_data", "merge_pieces", 1, "after"),  # published, pieces not removed
]


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: "-".join(map(str, moment[1:])))
def test_a_kill_at_any_moment_is_followed_by_a_clean_resume(tmp_path, small_pieces, capsys, moment):
    source = tmp_path / "a.jsonl"
    source.write_bytes(numbered(450))
    total = len(list(read_pieces([str(source)], [])))
    assert total == 9
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--append-eod"]
    command = [sys.executable, "-c", KILLED, *map(str, moment), *arguments, *NULL]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    done = len(list((tmp_path / "o.pieces").glob("*.piece")))
    index = tmp_path / "o_text_document.idx"
    assert not index.exists() or contents(tmp_path / "o_text_document") == expected(450)
    assert preprocess(*arguments) == 0
    error = capsys.readouterr().err
    assert (f"{done} of {total} " in error) == (done > 0)
    assert contents(tmp_path / "o_text_document") == expected(450)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "o_text_document.bin", "o_text_document.idx"]


@pytest.mark.full
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(numbered(150_000))
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", tmp_path / "a.jsonl", "--workers", "2"]
    process = subprocess.Popen([*command, "--output-prefix", tmp_path / "o", *NULL], stderr=subprocess.PIPE)
    while not list(tmp_path.glob("o.pieces/*.piece")):
        assert process.poll() is None
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.stderr.read()  # ends when the last process that holds it does
    assert not [pid for pid in workers if Path(f"/proc/{pid}/fd/0").exists()]
    assert preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o") == 0
    assert len(IndexedDataset(tmp_path / "o_text_document")) == 150_000


FULL_DISK = """
import resource, sys
from tools import preprocess_data
from tools.preprocessing import sources
sources._CHUNK_BYTES = 1 << 10
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(preprocess_data.main(sys.argv[2:]))
"""


@pytest.mark.full
@pytest.mark.parametrize(("limit", "named"), [(300, ".piece"), (2000, "o_..._document.bin"), (4200, "o_")])
def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path, small_pieces, limit, named):
    """The limits hold a part of a piece, all pieces but not the output, the tokens but not their index."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(numbered(450))
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--append-eod"]
    command = [sys.executable, "-c", FULL_DISK, str(limit), *arguments, *NULL]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "file too large" in run.stderr
    assert named in run.stderr
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.glob("o_*")), "nothing half-written, no temporary file either"
    assert preprocess(*arguments) == 0
    assert contents(tmp_path / "o_text_document") == expected(450)


@pytest.mark.full
def test_mutated_lines_give_their_tokens_or_are_reported():
    check_mutations(2_000, seed=0)


@pytest.mark.full
def test_ten_thousand_more_mutations():
    check_mutations(10_000, seed=1)


@pytest.mark.full
def test_any_texts_come_back(tmp_path, small_pieces):
    """Whatever JSON can say, written in any way, over any pieces, is what the tokenizer makes of each text by itself."""
    hypothesis = pytest.importorskip("hypothesis")
    strategies = hypothesis.strategies
    numbers = strategies.lists(strategies.integers(0, 100), max_size=30)

    @hypothesis.settings(max_examples=15, deadline=None)
    @hypothesis.given(
        strategies.lists(strategies.lists(numbers, max_size=4), min_size=1, max_size=40), strategies.booleans()
    )
    def check(documents, ascii_only):
        lines = [
            json.dumps({"text": [" ".join(map(str, part)) for part in document]}, ensure_ascii=ascii_only)
            for document in documents
        ]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        assert preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o") == 0
        assert contents(tmp_path / "o_text_document") == [[part for part in document if part] for document in documents]

    check()


MEMORY = """
import resource, sys
from tools import preprocess_data
from tools.preprocessing import sources
sources._CHUNK_BYTES = sources._LARGEST_PIECE = 1 << 15
assert preprocess_data.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_input(tmp_path):
    peaks = []
    for count in (20_000, 200_000):
        (tmp_path / "a.jsonl").write_bytes(numbered(count))
        arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *NULL]
        run = subprocess.run([sys.executable, "-c", MEMORY, *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        peaks.append(int(run.stdout))
    assert peaks[1] < peaks[0] * 1.1, f"{peaks} KB for 1 and 10 times the input"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_memory_does_not_grow_with_what_a_packed_file_holds(tmp_path, kind):
    """Equal lines: 5 KB of zstd, or 100 KB of gzip, are 40 MB of text, of which a piece is 1 MB."""
    ending, pack = PACKED[kind]
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(b'{"text": "1 2 3 4"}\n' * 2_000_000))
    tracemalloc.start()
    size = sum(len(chunk.text) for piece in read_pieces([str(path)], ["text"]) for chunk in piece.chunks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 40_000_000 and peak < 10_000_000, f"{peak:,} bytes"


def test_lengths_survive_the_piece_format(tmp_path):
    """A piece on disk holds what was encoded, read here by its description alone."""
    encoder = Encoder(build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=100)), ["a", "b"], True)
    encoded = encoder.encode([Chunk("f", 1, b'{"a": "1 2", "b": ["3", "4 5"]}\n{"a": "", "b": "6"}\n')])
    pieces.write_piece(str(tmp_path / "p"), encoded)
    header, content = (tmp_path / "p").read_bytes().split(b"\n", 1)
    assert json.loads(header)["columns"] == {"a": [3, 1, 2], "b": [6, 3, 2]}
    a, b = np.split(np.frombuffer(content, np.uint8), [4 + 16 + 6])
    assert [a[:4].view("<i4").tolist(), a[4:20].view("<i8").tolist(), a[20:].view("<u2").tolist()] == [
        [3],
        [1, 0],
        [1, 2, 100],
    ]
    assert b[28:].view("<u2").tolist() == [3, 4, 5, 100, 6, 100]


def test_a_pipe_is_read_as_a_file_is(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.jsonl").write_bytes(numbered(3))
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(numbered(5),))
    writer.start()
    inputs = ["--input", tmp_path / "pipe", tmp_path / "a.jsonl"]
    assert preprocess(*inputs, "--output-prefix", tmp_path / "o", "--append-eod") == 0
    writer.join()
    assert contents(tmp_path / "o_text_document") == expected(5) + expected(3)
    assert preprocess("--input", tmp_path / "pipe", tmp_path / "pipe", "--output-prefix", tmp_path / "p") == 1
    assert tells(capsys.readouterr().err, f"--input {tmp_path / 'pipe'}")


def test_an_output_that_cannot_be_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"a/b": "1"}\n')
    arguments = ["--input", tmp_path / "a.jsonl", "--json-keys", "a/b"]
    assert preprocess(*arguments, "--output-prefix", tmp_path / "o") == 2
    assert tells(capsys.readouterr().err, "--json-keys a/b")
    assert preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a.jsonl" / "o") == 1
    assert tells(capsys.readouterr().err, f"{tmp_path / 'a.jsonl'}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
