"""The numbers of Megatron core's releases themselves, on a CPU, against ours: the same tiny model, the same weights.

    python tests/compat/release_numbers.py CLONE [--folder FOLDER] [--tags TAG ...]

CLONE: a git clone of NVIDIA/Megatron-LM with its tags. FOLDER: keeps what the releases wrote, so that a second run only compares.

Each release runs in processes of its own (release_writer.py): a dense model, one with RMSNorm and SwiGLU, and both at TP 2. Its
checkpoint in torch_dist is read here bit for bit, and the model of it gives the release's loss and gradient norm, to 1e-6 in
float32. Exits with 1 if any differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.convert import open_any  # noqa: E402
from megatron.core.inference.load_model import load_gpt  # noqa: E402
from megatron.core.transformer.model_config import ModelConfig  # noqa: E402

TAGS = ("core_v0.17.1", "core_v0.19.0")
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (1, {}),
    "RMSNorm and SwiGLU": (1, LLAMA),
    "dense, TP 2": (2, {}),
    "RMSNorm and SwiGLU, TP 2": (2, LLAMA),
}
TOLERANCE = 1e-6
WRITER = Path(__file__).with_name("release_writer.py")


def written(clone: str, tag: str, case: str, folder: Path) -> Path:
    """Let a release write a case; return the folder of what it wrote."""
    tree = folder / tag / "tree"
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", clone, "archive", tag, "megatron"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    place = folder / tag / case.replace(" ", "_").replace(",", "")
    if not (place / "dist" / "latest_checkpointed_iteration.txt").exists():
        place.mkdir(parents=True, exist_ok=True)
        tp, options = CASES[case]
        (place / "options.json").write_text(json.dumps(options))
        command = [sys.executable, "-I", str(WRITER), str(tree), str(place), str(tp), str(place / "options.json")]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{tag}, {case}: {done.stderr[-3000:]}")
    return place


def whole_weights(place: Path, shapes: dict[str, torch.Size], gated: bool) -> dict[str, torch.Tensor]:
    """Return the release's parameters by name, put together from its ranks."""
    ranks = [np.load(path) for path in sorted((place / "weights").glob("*.npz"))]
    weights = {}
    for name in ranks[0]:
        parts = [torch.from_numpy(rank[name]) for rank in ranks]
        if parts[0].shape == shapes[name]:
            weights[name] = parts[0]
            continue
        dim = next(i for i, size in enumerate(shapes[name]) if size != parts[0].shape[i])
        if gated and "linear_fc1" in name:  # each rank has its rows of the gate, then of the other half
            halves = [part.chunk(2) for part in parts]
            parts = [half[i] for i in range(2) for half in halves]
        weights[name] = torch.cat(parts, dim)
    return weights


def compared(place: Path) -> dict[str, float]:
    """Return the relative differences of loss and norm, and the number of parameters that differ by a bit."""
    step = np.load(place / "step.npz")
    checkpoint = open_any(place / "dist")
    state = checkpoint.state
    config = ModelConfig(**state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8})
    model = load_gpt(checkpoint, config, vocab_size=state["vocab_size"], positions=config.max_position_embeddings)
    ours = {name.removeprefix("language_model."): p for name, p in model.named_parameters()}
    theirs = whole_weights(place, {name: p.shape for name, p in ours.items()}, config.is_gated)
    differing = [name for name in ours if not torch.equal(ours[name].detach(), theirs[name])]

    ids = torch.from_numpy(step["ids"])
    positions = torch.arange(ids.shape[1] - 1).expand(ids.shape[0], -1)
    for parameter in ours.values():
        parameter.requires_grad_()
    loss = model(ids[:, :-1], positions, labels=ids[:, 1:].contiguous()).mean()
    loss.backward()
    norm = sum(p.grad.double().square().sum().item() for p in ours.values()) ** 0.5
    return {
        "loss": abs(loss.item() / float(step["loss"]) - 1),
        "norm": abs(norm / float(step["norm"]) - 1),
        "parameters that differ": len(differing) + len(theirs.keys() ^ ours.keys()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tags", nargs="+", default=list(TAGS))
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    failed = False
    print(
        "| release | model | loss | gradient norm | parameters of the checkpoint that differ |\n|---|---|--:|--:|--:|"
    )
    for tag in asked.tags:
        for case in CASES:
            found = compared(written(asked.clone, tag, case, folder))
            numbers = f"{found['loss']:.1e} | {found['norm']:.1e} | {found['parameters that differ']}"
            print(f"| {tag} | {case} | {numbers} |", flush=True)
            failed |= max(found["loss"], found["norm"]) > TOLERANCE or found["parameters that differ"] > 0
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
