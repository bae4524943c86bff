"""Damaged data, by the thousand: whoever reads it gets the right tokens or an error in words, soon; never anything else.

    python tests/campaigns/fuzz_data.py --count 12000 --seed 0 --kills 300

Changed files are read by the code that training reads them with; killed and starved processes are followed by the same
command, undisturbed. What the right tokens are is known from the lists that the files were made of. It stops at the first
input that is answered otherwise, with its kind and number: the same seed makes it again. A table of counts comes at the end.
"""

import argparse
import contextlib
import io
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

from preprocessed_pieces import check_mutations, expected, numbered  # noqa: E402
from token_files import write as write_documents  # noqa: E402
from written_caches import write_cache  # noqa: E402

from megatron.core.datasets import DataConfig, IndexedDataset, build_gpt_datasets  # noqa: E402
from megatron.core.datasets.gpt_dataset_and_builder import GPTDataset  # noqa: E402
from megatron.core.datasets.index_map import IndexRequest, build_indices  # noqa: E402
from tools import merge_datasets, preprocess_data  # noqa: E402
from tools.preprocessing import sources  # noqa: E402

REFUSED, RIGHT = "refused", "right"
SECONDS = 20  # after which an input counts as a hang
TOKENIZER = types.SimpleNamespace(vocab_size=100, eod=99)
DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
S, SEED, SAMPLES = 8, 7, 40
Documents = list[list[list[int]]]  # [document][sequence][token]


# ---------------------------------------------------------------- what is damaged


def random_documents(rng: random.Random) -> Documents:
    def sequence() -> list[int]:
        return [rng.randrange(99) for _ in range(rng.choice([0, 1, 3, 20]))]

    documents = [[sequence() for _ in range(rng.choice([0, 1, 1, 2]))] for _ in range(rng.randint(1, 12))]
    return [*documents, [[1] * 20]]


def write(prefix: Path, documents: Documents, dtype: type = np.uint16) -> Path:
    return Path(write_documents(prefix, documents, dtype))


def sequences(documents: Documents) -> list[list[int]]:
    return [part for document in documents for part in document]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to three changes: a bit, a byte, a number of 4 or 8 bytes, an end cut off or added, bytes taken out or put in."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed += bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        elif kind == 4:
            del changed[at : at + rng.randint(1, 9)]
        elif kind == 5:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        else:
            size = rng.choice([4, 8])
            number = rng.choice([0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)])
            changed[at : at + size] = number.to_bytes(8, "little")[:size]
    return bytes(changed)


# ---------------------------------------------------------------- kinds of damage: each gives REFUSED or RIGHT


def damaged_index(rng: random.Random, folder: Path) -> str:
    """PREFIX.idx. What may pass unseen changes no token: a signed for an unsigned dtype, or the border of a document."""
    documents, dtype = random_documents(rng), rng.choice(DTYPES)
    path = Path(f"{write(folder / 'a', documents, dtype)}.idx")
    path.write_bytes(damaged(path.read_bytes(), rng))
    return tokens_are(folder / "a", sequences(documents))


def index_of_other_data(rng: random.Random, folder: Path) -> str:
    """PREFIX.idx of another file, or PREFIX.bin of another dtype; not of the same size, which nothing would tell apart."""
    first, second, dtypes = random_documents(rng), random_documents(rng), (np.uint16, np.uint16)
    if rng.random() < 0.5:
        second, dtypes = first, rng.choice([(np.uint16, np.int32), (np.int32, np.uint8), (np.int64, np.int16)])
    elif sum(map(len, sequences(first))) == sum(map(len, sequences(second))):
        second = [*second, [[1, 2, 3]]]
    write(folder / "a", first, dtypes[0])
    write(folder / "b", second, dtypes[1])
    ending = rng.choice([".idx", ".bin"])
    shutil.copy(folder / f"b{ending}", folder / f"a{ending}")
    answer = tokens_are(folder / "a", sequences(first))
    assert answer == REFUSED, "taken, though of another size"
    return answer


def damaged_tokens(rng: random.Random, folder: Path) -> str:
    """PREFIX.bin, whose tokens nothing protects: of the right size it is read as it is, ids of no vocabulary are refused."""
    documents, dtype = random_documents(rng), rng.choice(DTYPES)
    path = Path(f"{write(folder / 'a', documents, dtype)}.bin")
    path.write_bytes(damaged(path.read_bytes(), rng))
    if path.stat().st_size != sum(map(len, sequences(documents))) * np.dtype(dtype).itemsize:
        answer = tokens_are(folder / "a", sequences(documents))
        assert answer == REFUSED, "taken, though of another size"
        return answer
    tokens = np.frombuffer(path.read_bytes(), np.dtype(dtype).newbyteorder("<")).astype(object)
    ends = list(itertools.accumulate(map(len, sequences(documents))))
    parts = [tokens[end - len(part) : end].tolist() for end, part in zip(ends, sequences(documents))]
    assert tokens_are(folder / "a", parts) == RIGHT
    try:
        dataset = samples(folder, folder / "a", folder / "cache")
        texts = [text_of(dataset, i) for i in range(len(dataset))]
    except ValueError:
        return REFUSED
    assert texts == right_texts(parts)
    return RIGHT


def damaged_cache(rng: random.Random, folder: Path) -> str:
    """A file of the index cache: changed, cut, of another data set, or gone. The samples stay what they are."""
    documents = random_documents(rng)
    write(folder / "a", documents)
    samples(folder, folder / "a", folder / "cache")
    path = rng.choice(sorted((folder / "cache").iterdir()))
    spoil(path, rng, folder)
    return texts_are(folder, documents)


def damaged_found_cache(rng: random.Random, folder: Path) -> str:
    """The same of a cache that Megatron left. A shuffle of as many samples from elsewhere is taken: each comes once all the same."""
    documents = random_documents(rng)
    write(folder / "a", documents)
    lengths = np.array([len(part) for part in sequences(documents)])
    described = {"dataset_path": "/b/a", "num_samples": SAMPLES, "random_seed": SEED, "sequence_length": S}
    indices = build_indices(lengths, IndexRequest((0, len(lengths)), SAMPLES, S, SEED))
    write_cache(folder / "cache", "GPTDataset", "train", described, indices._asdict())
    spoil(rng.choice(sorted((folder / "cache").iterdir())), rng, folder)
    return texts_are(folder, documents, in_order=False)


def spoil(path: Path, rng: random.Random, folder: Path) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(
            rng.choice([b"", b"PK\x03\x04 a zip", b"\x80\x04K\x01.", b"\x93NUMPY", b"{}", b"null", b"[1]"])
        )
    elif kind == 2:
        write(folder / "b", random_documents(rng))
        samples(folder, folder / "b", folder / "other")
        part = path.name.split("-")[-1]
        shutil.copy(next((folder / "other").glob(f"*-{part}")), path)
    else:
        path.write_bytes(damaged(path.read_bytes(), rng))


def damaged_lines(rng: random.Random, folder: Path) -> str:
    """100 lines of JSON, half of them changed, UTF-8 broken among others: each gives its tokens or is reported by its number."""
    check_mutations(50, rng.getrandbits(32))
    return RIGHT


def killed_preprocessing(rng: random.Random, folder: Path) -> str:
    """SIGKILL at any moment, perhaps twice, then the same command to its end; with one worker, so that all is one process."""
    return interrupted(preprocessing(folder), rng, killed)


def starved_preprocessing(rng: random.Random, folder: Path) -> str:
    """A disk that is full after some bytes."""
    return interrupted(preprocessing(folder), rng, starved)


def killed_merge(rng: random.Random, folder: Path) -> str:
    return interrupted(merging(folder), rng, rng.choice([killed, starved]))


def killed_index_building(rng: random.Random, folder: Path) -> str:
    return interrupted(index_building(folder), rng, rng.choice([killed, starved]))


KINDS: dict[str, Callable[[random.Random, Path], str]] = {
    f.__name__: f
    for f in (damaged_index, index_of_other_data, damaged_tokens, damaged_cache, damaged_found_cache, damaged_lines)
}
INTERRUPTIONS = {
    f.__name__: f for f in (killed_preprocessing, starved_preprocessing, killed_merge, killed_index_building)
}


# ---------------------------------------------------------------- what is right


def tokens_are(prefix: Path, parts: list[list[int]]) -> str:
    """RIGHT if every sequence is read as it should be, REFUSED if the file is. Another number is an error."""
    try:
        dataset = IndexedDataset(prefix)
        assert len(dataset) == len(parts)
        assert [part.tolist() for part in dataset[:]] == parts
    except ValueError as error:
        assert str(prefix) in str(error), f"the file is not named: {error}"
        return REFUSED
    return RIGHT


def samples(folder: Path, prefix: Path, cache: Path) -> GPTDataset:
    config = DataConfig(data_path=[str(prefix)], seq_length=S, split="1", data_cache_path=str(cache))
    return build_gpt_datasets(config, TOKENIZER, [SAMPLES, 0, 0], SEED, say=lambda line: None)[0]


def text_of(dataset: GPTDataset, i: int) -> list[int]:
    item = dataset[i]
    return [*item["tokens"].tolist(), int(item["labels"][-1])]


def right_texts(parts: list[list[int]]) -> list[list[int]]:
    """Every sample, laid out by the definition: shuffled documents end to end, S + 1 tokens every S."""
    lengths = np.array([len(part) for part in parts])
    indices = build_indices(lengths, IndexRequest((0, len(parts)), SAMPLES, S, SEED))
    stream = [token for d in indices.document_index for token in parts[d]]
    return [stream[k * S : k * S + S + 1] for k in indices.shuffle_index.tolist()]


def texts_are(folder: Path, documents: Documents, *, in_order: bool = True) -> str:
    dataset, right = samples(folder, folder / "a", folder / "cache"), right_texts(sequences(documents))
    texts = [text_of(dataset, i) for i in range(len(dataset))]
    assert texts == right if in_order else sorted(texts) == sorted(right)
    return RIGHT


# ---------------------------------------------------------------- work that is interrupted


class Work:
    """run: the command, 0 if it ended well. is_there: whether its output has appeared. check: that the output is right."""

    def __init__(self, run: Callable[[], int], is_there: Callable[[], bool], check: Callable[[], None]):
        self.run, self.is_there, self.check = run, is_there, check


def preprocessing(folder: Path) -> Work:
    (folder / "in.jsonl").write_bytes(numbered(450))
    arguments = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "o"), "--append-eod"]
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    prefix = folder / "o_text_document"

    def check() -> None:
        assert tokens_are(prefix, sequences(expected(450))) == RIGHT

    return Work(lambda: preprocess_data.main([*arguments, *null]), Path(f"{prefix}.idx").exists, check)


def merging(folder: Path) -> Work:
    rng = random.Random(1)
    parts = [[[[rng.randrange(99) for _ in range(30)]]] * 20 for _ in range(3)]
    names = [str(write(folder / f"part{i}", part)) for i, part in enumerate(parts)]
    arguments = ["--input", *names, "--output-prefix", str(folder / "merged")]

    def check() -> None:
        assert tokens_are(folder / "merged", [p for part in parts for p in sequences(part)]) == RIGHT

    return Work(lambda: merge_datasets.main(arguments), (folder / "merged.idx").exists, check)


def index_building(folder: Path) -> Work:
    documents = [[[(i * k) % 99 for k in range(i % 40)]] for i in range(200)]
    write(folder / "a", documents)

    def run() -> int:
        try:
            samples(folder, folder / "a", folder / "cache")
        except ValueError as error:
            assert "cache" in str(error)
            return 1
        return 0

    return Work(run, lambda: False, lambda: texts_are(folder, documents) and None)


def interrupted(work: Work, rng: random.Random, how: Callable[[Work, random.Random], None]) -> str:
    for _ in range(rng.choice([1, 1, 2])):
        how(work, rng)
        if work.is_there():
            work.check()  # what has appeared under its name is complete
    assert in_child(work.run) == 0, "the same command does not go on"
    work.check()
    return RIGHT


def killed(work: Work, rng: random.Random) -> None:
    in_child(work.run, kill_after=rng.random() ** 2 * 0.15)


def starved(work: Work, rng: random.Random) -> None:
    limit = int(rng.random() ** 2 * 12_000)

    def run() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return work.run()

    assert in_child(run) in (0, 1), "a full disk ends in a crash"


def in_child(run: Callable[[], int], kill_after: float | None = None) -> int:
    """Exit code of `run` in a process of its own, in silence; minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = run()
        finally:
            os._exit(code)
    deadline = time.monotonic() + (SECONDS if kill_after is None else kill_after)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            assert kill_after is not None, f"still running after {SECONDS} s"
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.0005)
    return os.waitstatus_to_exitcode(ended[1])


# ---------------------------------------------------------------- the run


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"still reading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(kind: str, rng: random.Random) -> str:
    """One damaged input of a kind: REFUSED or RIGHT; anything else is raised."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # every write here waits for the disk otherwise
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=memory) as folder, no_hang():
        return (KINDS | INTERRUPTIONS)[kind](rng, Path(folder))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=12_000, help="changed files, of all kinds together")
    parser.add_argument("--kills", type=int, default=300, help="interrupted commands")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    sources._CHUNK_BYTES = 1 << 10  # small inputs have many pieces
    counts: Counter[tuple[str, str]] = Counter()
    plan = [(list(KINDS)[i % len(KINDS)], i) for i in range(given.count)]
    plan += [(list(INTERRUPTIONS)[i % len(INTERRUPTIONS)], i) for i in range(given.kills)]
    for kind, number in plan:
        try:
            counts[kind, answer(kind, random.Random(f"{given.seed} {kind} {number}"))] += 1
        except BaseException:
            print(f"failed: {kind}, number {number} of seed {given.seed}", file=sys.stderr)
            raise
        if number % 1000 == 999:
            print(f"{kind} {number + 1}", file=sys.stderr, flush=True)
    print("| damage | inputs | refused by name | right tokens |\n|---|---|---|---|")
    for kind in dict.fromkeys(kind for kind, _ in plan):
        refused, right = counts[kind, REFUSED], counts[kind, RIGHT]
        print(f"| {kind.replace('_', ' ')} | {refused + right:,} | {refused:,} | {right:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
