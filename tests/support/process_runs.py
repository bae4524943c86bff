"""Small models that the tests over processes train, and what they do with the checkpoints."""

import json
import shutil
from pathlib import Path
from shlex import split

# Small, but with more than one of everything: layers in a stage, heads on a rank, micro-batches in a step. The
# vocabulary of 1000 is padded to 1056 rows on one tensor rank and to 1152 on two.
GPT2 = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --make-vocab-size-divisible-by 96 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)
LLAMA = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --make-vocab-size-divisible-by 96 "
    "--hidden-dropout 0 --attention-dropout 0 --ffn-hidden-size 96 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights"
)
MODELS = {"gpt2": GPT2, "llama": LLAMA}
STEPS = split("--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --weight-decay 0.1 --clip-grad 1.0 --device cpu")
TWENTY = split("--train-iters 20 --log-interval 1 --eval-interval 10 --eval-iters 2")


def rewound(saved: Path, iteration: int, copy: Path) -> Path:
    """A copy of a checkpoint folder whose latest iteration is an earlier one."""
    shutil.copytree(saved, copy)
    (copy / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return copy


def assert_same_checkpoint(got: Path, expected: Path) -> None:
    """Equal bytes of tensors in equal files, and equal state, but for where the two runs were told to save and to stop."""
    a, b = (json.loads((folder / "manifest.json").read_text()) for folder in (got, expected))
    assert a["tensors"].keys() == b["tensors"].keys()
    for name, record in b["tensors"].items():
        assert a["tensors"][name] == record, f"{name} differs: {a['tensors'][name]} instead of {record}"
    assert a["files"] == b["files"]
    for name in b["files"]:
        assert (got / name).read_bytes() == (expected / name).read_bytes(), f"{name} differs"
    for state in (a["state"], b["state"]):
        del state["config"]["checkpoint"], state["config"]["training"]["exit_interval"]
        del state["checkpoints"]  # which the run has saved
    assert a["state"] == b["state"]
