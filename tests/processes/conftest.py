"""What the tests of this folder share: real text made ready by the tools, and runs that several tests look at."""

import fcntl
import json
import os
import pickle
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from process_runs import MODELS, STEPS, TWENTY
from processes import Layout, Outcome, pretrain

from tools import preprocess_data, train_tokenizer

_TEXT_BYTES = 400_000

T = TypeVar("T")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of one test run have in common, where they are several."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(path: Path, make: Callable[[], T]) -> T:
    """What `make` returns, called by the first of the processes that ask for `path`; the others wait and are handed a copy."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        return pickle.loads(path.read_bytes())


@pytest.fixture(scope="session")
def data(shared: Path) -> list[str]:
    """Flags of a data set and its tokenizer."""
    return once(shared / "data_flags", lambda: make_data(shared))


def make_data(folder: Path) -> list[str]:
    """By the tools from Python's own source."""
    text, tokenizer, prefix = folder / "text.jsonl", folder / "tokenizer.json", folder / "source"
    text.write_text("".join(json.dumps({"text": source}) + "\n" for source in _sources()))
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    made = ["--input", str(text), "--vocab-size", "1000", "--output", str(tokenizer)]
    assert train_tokenizer.main(made) == 0
    assert preprocess_data.main(["--input", str(text), "--output-prefix", str(prefix), "--append-eod", *flags]) == 0
    return [*flags, "--data-path", f"{prefix}_text_document", "--split", "80,15,5"]


def _sources() -> list[str]:
    """Some of the standard library: its smaller modules in the order of their names, `_TEXT_BYTES` in all."""
    sources, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if 500 < path.stat().st_size < 30_000 and size < _TEXT_BYTES:
            sources.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(sources[-1])
    return sources


ONE_PROCESS = Layout()


@dataclass
class TwentySteps:
    """Runs of 20 steps, saved at 10 and 20, each made when first asked for, by whichever process of the test run asks."""

    data: list[str]
    folder: Path
    _made: dict[tuple[str, Layout], Outcome] = field(default_factory=dict)

    def __call__(self, model: str, layout: Layout = ONE_PROCESS) -> Outcome:
        key = (model, layout)
        if key not in self._made:
            flags = [*self.flags(model), "--save", str(self.saved(model, layout)), "--save-interval", "10"]
            self._made[key] = once(self.folder / f"{model}-{layout}-outcome", lambda: pretrain(flags, layout))
        return self._made[key]

    def flags(self, model: str) -> list[str]:
        return [*MODELS[model], *STEPS, *TWENTY, *self.data]

    def saved(self, model: str, layout: Layout) -> Path:
        """Where the run's checkpoints are."""
        return self.folder / f"{model}-{layout}"


@pytest.fixture(scope="session")
def twenty_steps(data: list[str], shared: Path) -> TwentySteps:
    return TwentySteps(data, shared)
