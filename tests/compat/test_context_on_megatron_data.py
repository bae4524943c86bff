"""Samples of 8,192 tokens that four processes share, from token files that megatron-core's own builder wrote: the losses of one process.

    pip install --target FOLDER --no-deps megatron-core==0.16.1
    MEGATRON_CORE_PATH=FOLDER python -m pytest tests/compat/test_context_on_megatron_data.py

float32 over gloo, each --cp-comm-type, context parallelism of 4 and of 2 with tensor parallelism of 2.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_samples import KINDS, SHARED, Text, documents

LENGTH = 8192
CORE_PATH = os.environ.get("MEGATRON_CORE_PATH")
ORACLE = Path(__file__).with_name("oracle.py")
pytestmark = pytest.mark.skipif(
    CORE_PATH is None or not Path(CORE_PATH, "megatron", "core").is_dir(),
    reason="MEGATRON_CORE_PATH names no folder with megatron-core; see the head of this file",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("megatron")
    prefix, cases = str(folder / "passages"), folder / "cases.json"
    cases.write_text(json.dumps([("write", {"prefix": prefix, "documents": documents(4 * LENGTH), "dtype": "uint16"})]))
    subprocess.run([sys.executable, "-I", str(ORACLE), CORE_PATH, str(cases), str(folder)], check=True, cwd=folder)
    return Text(prefix, LENGTH, timeout=600)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", SHARED)
def test_samples_of_8192_tokens_train_to_the_losses_of_one_process(text: Text, sharing: str, kind: str):
    text.assert_shared(sharing, kind)
