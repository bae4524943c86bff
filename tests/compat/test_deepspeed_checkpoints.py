"""Checkpoints that the published DeepSpeed wrote itself, ZeRO 2 and 3 over two ranks: what we say of them, done, loads. Optional.

pip install --target FOLDER deepspeed==0.19.8 safetensors huggingface_hub --no-deps einops hjson msgpack ninja psutil py-cpuinfo \
    pydantic pydantic-core annotated-types typing-inspection tqdm
DEEPSPEED_PATH=FOLDER python -m pytest -m full tests/compat/test_deepspeed_checkpoints.py

DeepSpeed compiles a part of itself with c++ on first use, into TORCH_EXTENSIONS_DIR.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference.load_model import load_gpt
from megatron.core.transformer.model_config import ModelConfig

PATH = os.environ.get("DEEPSPEED_PATH")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        PATH is None or not Path(PATH, "deepspeed").is_dir(),
        reason="DEEPSPEED_PATH names no folder with deepspeed; see the head of this file",
    ),
]
WRITER = Path(__file__).with_name("deepspeed_writer.py")
TAG = "global_step2"


def done(command: list[str], folder: Path, **more: str) -> subprocess.Popen:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"} | more
    environment |= {"PYTHONPATH": PATH}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def check(*processes: subprocess.Popen) -> None:
    said = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)[-4000:]


@pytest.fixture(scope="module", params=[2, 3])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deepspeed") / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, str(WRITER), str(out), str(request.param)]
    check(*(done(command, out.parent, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"))
    return out


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        open_any(folder)
    return str(error.value)


def command_in(said: str) -> list[str]:
    """The command of DeepSpeed's that the line names, for this interpreter."""
    return [sys.executable, *shlex.split(re.search(r"python (zero_to_fp32\.py [^;]*)", said)[1])]


def test_the_command_that_is_named_makes_a_folder_with_its_scores(written: Path):
    check(done(command_in(refusal(written)), written))
    shutil.copy(f"{written}.config.json", written / "OUT" / "config.json")
    checkpoint = open_any(written / "OUT")
    config = ModelConfig(**checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 1})
    model = load_gpt(checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=32)
    ids = torch.arange(8)[None] * 3 % 31
    scores = torch.tensor(np.load(f"{written}.npy"))
    assert (model(ids, torch.arange(8)[None]) - scores).abs().max() < 1e-5 < scores.abs().max()


def test_a_universal_folder_is_refused_with_the_same_command(written: Path):
    """DeepSpeed makes it of the same checkpoint, whose weights it does not change."""
    universal = f"{TAG}_universal"
    words = [
        "--input_folder",
        str(written / TAG),
        "--output_folder",
        str(written / universal),
        "--inject_missing_state",
    ]
    check(done([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], written))
    assert (written / universal / "zero").is_dir()
    (written / "latest_universal").write_text(universal)
    said = refusal(written / universal)
    assert "universal" in said and command_in(said)[1:] == command_in(refusal(written))[1:]
