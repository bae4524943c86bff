"""Checkpoints that the published megatron-core package wrote itself, over TP 2 x PP 2: they load as they lie, to its scores. Optional.

pip install --target FOLDER --no-deps megatron-core==0.16.1 psutil
MEGATRON_CORE_PATH=FOLDER python -m pytest -m full tests/compat/test_megatron_checkpoints.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.convert import open_any
from megatron.core.inference.load_model import load_gpt
from megatron.core.transformer.model_config import ModelConfig

CORE_PATH = os.environ.get("MEGATRON_CORE_PATH")
needs_core = pytest.mark.skipif(
    CORE_PATH is None or not Path(CORE_PATH, "megatron", "core").is_dir(),
    reason="MEGATRON_CORE_PATH names no folder with megatron-core; see the head of this file",
)
WRITER = Path(__file__).with_name("checkpoint_writer.py")
ROPE = {"position_embedding_type": "rope", "max_position_embeddings": 32}
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, **ROPE}
LLAMA |= {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 4}
CASES = [["gpt", 2, 2, {}], ["llama", 2, 2, LLAMA | {"untie_embeddings_and_output_weights": True}]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("core")
    (root / "cases.json").write_text(json.dumps(CASES))
    command = [sys.executable, "-I", str(WRITER), CORE_PATH, str(root), str(root / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["dist", "classic"])
@pytest.mark.parametrize("case", [case[0] for case in CASES])
def test_files_of_megatron_core_give_its_scores(case: str, kind: str, written: Path):
    checkpoint = open_any(written / case / kind)
    state = checkpoint.state
    config = ModelConfig(**state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8, "fp64": True})
    model = load_gpt(checkpoint, config, vocab_size=state["vocab_size"], positions=config.max_position_embeddings)
    tokens = torch.randint(0, 32, (3, 14), generator=torch.Generator().manual_seed(5))
    found = model(tokens, torch.arange(14).expand_as(tokens))
    assert (found - torch.tensor(np.load(written / case / "scores.npy"))).abs().max() < 1e-10


@pytest.mark.parametrize("cases", [[], CASES], ids=["no case", "all cases"])
def test_the_writer_says_that_psutil_is_missing(cases: list, tmp_path: Path):
    """The package raises in a process of its own, whose results its save would wait for without end. -S: no installed packages."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-I", "-S", str(WRITER), str(tmp_path), str(tmp_path), str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        f"psutil is missing, without which torch_dist is not written: pip install --target {tmp_path} psutil"
    )
