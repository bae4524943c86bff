"""Unit tests of Megatron core 0.5.0, not one line changed, over our `megatron` on a CPU.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_megatron_units.py -s

CLONE: as in test_megatron_scripts.py. `cuda_on_cpu` does what the tests ask of CUDA. Each folder runs in processes of its own;
the counts, and each test that is left out with its reason, are printed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, free_port

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
TAG = "core_v0.5.0"
ENGINE = "counts or names what is fused in Transformer Engine's layers, which are CUDA kernels"
NOT_YET = "imports megatron.core.dist_checkpointing, which is not there yet"
# Of each folder: a file or a test that is left out -> the feature without which it does not run.
LEFT_OUT = {
    "models": {
        "test_t5_model.py": "T5",
        "test_base_embedding.py::TestBaseEmbedding::test_gpu_forward": "asserts that a tensor's device is CUDA",
    },
    "transformer": {
        "moe": "mixture of experts",
        "test_attention_packed_seq.py": "packed sequences",
        "test_core_attention.py": "holds no test; imports the cross attention of T5",
        "test_retro_attention.py": "retro",
        "test_spec_customization.py": "imports transformer_engine, CUDA kernels",
        "test_attention.py::TestParallelAttention::test_constructor": ENGINE,
        "test_transformer_block.py": NOT_YET,
        "test_transformer_layer.py": NOT_YET,
        "test_transformer_layer.py::TestParallelTransformerLayer::test_sharded_state_dict": ENGINE + "; 8 processes",
    },
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests of the tag."""
    folder = tmp_path_factory.mktemp("units")
    archive = subprocess.run(["git", "-C", CLONE, "archive", TAG, "tests/unit_tests"], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("folder", LEFT_OUT)
def test_unit_tests_of_megatron_pass(folder: str, clone: Path):
    tests, out = f"tests/unit_tests/{folder}", LEFT_OUT[folder]
    flags = [f"--{'deselect' if '::' in name else 'ignore'}={tests}/{name}" for name in out]
    paths = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    ranks = {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "cuda_on_cpu", f"--rootdir={clone}", *flags, tests],
        cwd=clone,
        env={**os.environ, **ranks, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"\n{folder}: {done.stdout.splitlines()[-1]}; left out: {len(out)}")
    print("".join(f"    {name}: {reason}\n" for name, reason in out.items()))
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 5
