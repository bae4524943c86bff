"""Every kind of bad input ends every rank of every layout with a code, in words, and once. Processes, since they must agree on it.

One job of each number of ranks is given all lines in turn (`refused_script.py`). Exit codes of processes that end are in
test_start.py and test_faults.py.
"""

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import whole_run
from processes import run
from refusals import BASE, MOCK, REAL, REFUSALS
from said import tells

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter

SCRIPT = str(Path(__file__).with_name("refused_script.py"))
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
LAYOUTS = {
    1: {"one process": ""},
    2: {"dp 2": "", "tp 2": TP, "pp 2": PP},
    3: {},
    4: {"tp 2, pp 2": TP + PP},
}  # of jobs of so many ranks
IS_NO_MISTAKE_THERE = {
    *(("chunks without a pipeline", layout) for layout in ("pp 2", "tp 2, pp 2")),
    *(("V without a pipeline", layout) for layout in ("pp 2", "tp 2, pp 2")),
    *(("parts of what is whole", layout) for layout in ("tp 2", "tp 2, pp 2")),
}

# What is found once there are processes: flags, what is said. {tmp} holds what `files` makes.
DATA = REAL + "--eval-iters 0 --log-interval 1 --data-path {tmp}/"
LOAD = MOCK + "--eval-iters 0 --global-batch-size 4 --load {tmp}/"
LATER = {
    "data cut off": (DATA + "cut", "{tmp}/cut.bin 1000 {tmp}/cut.idx 2000"),
    "index cut off": (DATA + "cut_index", "{tmp}/cut_index.idx 50"),
    "index of something else": (DATA + "other", "{tmp}/other.idx"),
    "tokens missing": (DATA + "no_tokens", "{tmp}/no_tokens.bin"),
    "empty split": (DATA + "good --split 0,1,1", "--split"),
    "split without documents": (DATA + "good --split 1,999,0", "--split 1,999,0 100"),
    "no folder": (LOAD + "nothing", "--load {tmp}/nothing"),
    "damaged checkpoint": (LOAD + "damaged", "{tmp}/damaged/iter_0000002/rank_00000.bin sha256"),
    "checkpoint without a file": (LOAD + "lacking", "{tmp}/lacking/iter_0000002 rank_00000.bin"),
    "checkpoint without its list": (LOAD + "unlisted", "{tmp}/unlisted/iter_0000002 manifest.json"),
    "checkpoint of another width": (LOAD + "saved --hidden-size 64", "hidden_size 48 64"),
    "checkpoint of another depth": (LOAD + "saved --num-layers 8", "num_layers 4 8"),
    "checkpoint of another vocabulary": (LOAD + "saved --vocab-size 90", "61 91"),
    "checkpoint of another schedule": (LOAD + "saved --lr 2e-3", "--override-opt_param-scheduler"),
    "no number": (MOCK + "--eval-iters 0 --global-batch-size 4 --lr 1e30", "--lr"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with what is good, and with what is not."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "file").write_text("not a folder")
    for name in ("good", "cut", "cut_index", "no_tokens", "other"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for number in range(100):
                writer.add_document([number % 60] * 10)
    (folder / "cut.bin").write_bytes((folder / "cut.bin").read_bytes()[:1000])
    (folder / "cut_index.idx").write_bytes((folder / "cut_index.idx").read_bytes()[:50])
    (folder / "other.idx").write_bytes(b"once upon a time there was a file of another kind")
    (folder / "no_tokens.bin").unlink()
    words = shlex.split(BASE + MOCK + f"--eval-iters 0 --global-batch-size 4 --exit-interval 2 --save {folder}/saved")
    whole_run.run(words, tiny=[])
    for name in ("damaged", "lacking", "unlisted"):
        shutil.copytree(folder / "saved", folder / name)
    content = bytearray((folder / "damaged/iter_0000002/rank_00000.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "damaged/iter_0000002/rank_00000.bin").write_bytes(content)
    (folder / "lacking/iter_0000002/rank_00000.bin").unlink()
    (folder / "unlisted/iter_0000002/manifest.json").unlink()
    return folder


@dataclass(frozen=True)
class Case:
    what: str
    flags: str
    said: str  # as `tells` takes it


def cases(ranks: int) -> list[Case]:
    """All lines that a job of so many ranks is given."""
    kinds = [(name, 1, *later) for name, later in LATER.items()] + [(name, *kind) for name, kind in REFUSALS.items()]
    return [
        Case(f"{name} ({layout})" if layout else name, flags + " " + more, said)
        for name, own_ranks, flags, said in kinds
        for layout, more in (
            LAYOUTS[ranks].items() if own_ranks == 1 else {"": ""}.items() if own_ranks == ranks else ()
        )
        if (name, layout) not in IS_NO_MISTAKE_THERE
    ]


def test_every_kind_is_run_on_some_layout():
    run_there = {case.what.split(" (")[0] for ranks in LAYOUTS for case in cases(ranks)}
    assert run_there == {*REFUSALS, *LATER} and len(run_there) > 60


@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 2, 3)), 4])
def test_each_kind_is_refused_by_all_ranks_once_and_in_words(ranks: int, files: Path, tmp_path: Path):
    lines, given = tmp_path / "lines.json", cases(ranks)
    lines.write_text(json.dumps([shlex.split((BASE + case.flags).replace("{tmp}", str(files))) for case in given]))
    run([SCRIPT, str(lines)], ranks).succeeded()
    of_ranks = [json.loads(lines.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    for case, *outcomes in zip(given, *of_ranks, strict=True):
        codes, said, seconds = zip(*outcomes)
        everything = "".join(said)
        assert all(codes), f"{case.what}: exit codes {codes}, said {everything!r}"
        assert "Traceback" not in everything and "Error:" not in everything, f"{case.what}: {everything}"
        assert tells(everything, case.said.replace("{tmp}", str(files))), f"{case.what}: {everything!r}"
        told = everything.count("cannot start, ") + everything.count("stopping, " if ranks == 1 else " failed: ")
        assert told == 1, f"{case.what}: said {told} times: {everything}"
        assert max(seconds) < 30, f"{case.what}: {seconds}"
