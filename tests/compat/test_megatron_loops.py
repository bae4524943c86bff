"""The quick-start loops of Megatron core, not one line changed, over our `megatron` on a CPU.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_megatron_loops.py

CLONE: as in test_megatron_scripts.py. `megatron.porting.map_cuda_to_cpu` does what the loops ask of CUDA.
"""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import ROOT, run

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
LOOP = "examples/run_simple_mcore_train_loop.py"
RUN = """import os, runpy, sys
from megatron.porting.map_cuda_to_cpu import map_to_cpu
map_to_cpu()
os.chdir(os.path.dirname(sys.argv[1]))
optim = runpy.run_path(sys.argv[1], run_name="__main__")["optim"]
print("updates", *{int(state["step"]) for state in optim.state.values()}, "of", len(optim.state) > 20)
"""


@pytest.mark.full
@pytest.mark.parametrize("tag, ranks", [("core_v0.12.0", 2), ("core_v0.16.1", 2), ("core_v0.16.1", 4)])
def test_a_quick_start_loop_trains_saves_and_loads(tag: str, ranks: int, tmp_path: Path, monkeypatch):
    script = tmp_path / "loop.py"
    shown = subprocess.run(["git", "-C", CLONE, "show", f"{tag}:{LOOP}"], capture_output=True, check=True)
    script.write_bytes(shown.stdout)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, Path(__file__).parent))))
    done = run(["-c", RUN, str(script)], ranks, timeout=120).succeeded()
    for said in done.stdout:
        losses = [float(loss) for loss in re.findall(r"'lm loss': tensor\(([0-9.]+)", said)]
        assert losses == pytest.approx([math.log(100)] * 5, rel=0.1)
        assert "Successfully loaded the model" in said and "updates 5 of True" in said
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").is_file()
