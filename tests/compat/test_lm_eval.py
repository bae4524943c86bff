"""lm-evaluation-harness 0.4.13 gives the same figures over our adapter as over its Hugging Face backend, of the same weights.

    python3 -m venv harness; harness/bin/pip install torch==2.13.0 transformers accelerate lm_eval==0.4.13
    LM_EVAL_PYTHON=harness/bin/python python -m pytest tests/compat/test_lm_eval.py -s

The interpreter has an environment of its own. Three definitions, in the form of arc_easy, lambada_openai and wikitext, read
local files that the test makes; a fourth generates text.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("LM_EVAL_PYTHON")
COMPARE = Path(__file__).parent.parent / "support" / "lm_eval_compare.py"
pytestmark = pytest.mark.skipif(not PYTHON, reason="LM_EVAL_PYTHON names no interpreter; see the head of this file")


@pytest.mark.full
def test_figures_are_those_of_the_hugging_face_backend(tmp_path: Path):
    done = subprocess.run([str(PYTHON), str(COMPARE), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{json.dumps(said, indent=2)}")
    assert said["likelihoods"]["largest difference"] < 1e-4 and said["likelihoods"]["requests"] > 100
    assert said["greedy"]["equal"]
    assert said["texts"]["equal"] == said["texts"]["of"] > 10 and said["texts"]["different ones"] > 5
    tasks = {"local_choices", "local_words", "local_pages", "local_texts"}
    assert said["hf"].keys() == said["megatron"].keys() == tasks
    for task in tasks:
        assert said["hf"][task].keys() == said["megatron"][task].keys() and said["hf"][task]
        for name, value in said["hf"][task].items():
            ours = said["megatron"][task][name]
            assert ours == value if name.startswith(("acc", "exact")) else ours == pytest.approx(value, rel=1e-4)
