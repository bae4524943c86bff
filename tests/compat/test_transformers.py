"""What is written here loads in transformers 5 and 4.57 with the same scores, and what is recorded is what they compute.

    python3 -m venv v5; v5/bin/pip install torch==2.13.0 transformers==5.23.0 sentencepiece protobuf
    python3 -m venv v4; v4/bin/pip install torch==2.13.0 transformers==4.57.6 sentencepiece protobuf
    TRANSFORMERS_PYTHONS=v5/bin/python:v4/bin/python python -m pytest tests/compat/test_transformers.py -s

Each interpreter has an environment of its own, and reads files alone. The first is that of the records, 5.23.0.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHONS = [path for path in os.environ.get("TRANSFORMERS_PYTHONS", "").split(":") if path]
EXCHANGE = Path(__file__).parent.parent / "support" / "exchange"
pytestmark = pytest.mark.skipif(
    not PYTHONS, reason="TRANSFORMERS_PYTHONS names no interpreters; see the head of this file"
)


def told(python: str, *words: str) -> str:
    """What a command of tests/support/exchange prints; it must end with code 0."""
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    command = [python, str(EXCHANGE / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(f"\n{done.stdout}", end="")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    told(sys.executable, "loads.py", "write", str(root))
    return root


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_what_is_written_loads_with_the_same_scores(python: str, written: Path):
    told(python, "loads.py", str(written))


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_names_and_shapes_of_published_models_are_those_recorded(python: str):
    assert " 0 differ" in told(python, "published.py", "--check")


@pytest.mark.full
def test_the_records_are_what_transformers_computes():
    assert "differs by" in told(PYTHONS[0], "record.py", "--check")


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_tokenizers_that_are_carried_give_the_same_ids(python: str, tmp_path: Path):
    told(sys.executable, "tokenizer_folders.py", "write", str(tmp_path))
    assert told(python, "tokenizer_folders.py", str(tmp_path)).count("ids, equal") == 3
