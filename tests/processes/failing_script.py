"""A user's script in which one rank fails, or dies without a word: `--fails-how` says how. tests/processes/test_faults.py runs it."""

import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.parallel import init_and_destroy_distributed as job
from megatron.core.parallel_state import launched_rank
from megatron.training import get_args, pretrain
from megatron.training.global_vars import is_dry_run

calls = 0


def failing_forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Any]:
    """The forward of GPT, but for the third one of the rank that fails."""
    global calls
    calls += not is_dry_run()
    args = get_args()
    fails = calls == 3 and launched_rank() == args.fails_rank
    if fails and args.fails_how == "before":
        raise KeyError("the disk is on fire")
    output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    if fails and args.fails_how == "memory":
        torch.empty(2**60)
    if fails and args.fails_how == "after":
        raise KeyError("the disk is on fire")
    return (output * float("nan"), loss_func) if fails and args.fails_how == "nan" else (output, loss_func)


def dying_model_provider(**where: Any) -> nn.Module:
    args = get_args()
    if args.fails_how == "dies while building" and launched_rank() == args.fails_rank:
        os._exit(9)
    return pretrain_gpt.model_provider(**where)


def dying_replace(source: str, target: str) -> None:
    """`os.replace`, but for the one that would make the first checkpoint the latest."""
    if Path(target).name == "latest_checkpointed_iteration.txt":
        os.kill(os.getpid(), signal.SIGKILL)
    _replace(source, target)


_replace = os.replace


def die_while_meeting() -> None:
    """When the others know that this rank has come."""
    until = time.monotonic() + 5
    while not getattr(job, "_client", None) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    os._exit(9)


def extra_args(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--fails-rank", type=int)
    parser.add_argument(
        "--fails-how",
        choices=(
            *("before", "after", "memory", "nan"),
            *("dies before it joins", "dies while meeting", "dies while building", "dies while saving"),
        ),
    )
    words = sys.argv
    if words[words.index("--fails-rank") + 1] == os.environ.get("RANK", "0"):
        if "dies before it joins" in words:
            os._exit(9)
        if "dies while meeting" in words:
            threading.Thread(target=die_while_meeting, daemon=True).start()
        if "dies while saving" in words:
            os.replace = dying_replace
    if "dies while meeting" in words and os.environ["RANK"] == "2":
        time.sleep(1.5)  # the others know of the death by then, and the first rank has stayed to tell of it
    return parser


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        dying_model_provider,
        ModelType.encoder_or_decoder,
        failing_forward_step,
        extra_args_provider=extra_args,
    )
