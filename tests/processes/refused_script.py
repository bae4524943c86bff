"""One job that is given command line after command line, so that many refusals cost one start: test_refused_on_layouts.py runs it.

    refused_script.py LINES        a JSON list of command lines, each a list of words

Every rank writes `LINES.RANK`: for each line a list of exit code (None if it trained to its end), what was said on stderr, seconds.
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.training import pretrain
from megatron.training.fault_tolerance import failure_shutdown


def outcome_of(words: list[str]) -> tuple[int | None, str, float]:
    """What pretrain_gpt.py makes of one command line."""
    code, said, began = None, io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            pretrain(
                pretrain_gpt.train_valid_test_datasets_provider,
                pretrain_gpt.model_provider,
                ModelType.encoder_or_decoder,
                pretrain_gpt.forward_step,
                rules=GPT_RULES,
                argv=words,
            )
        except SystemExit as stop:
            code = stop.code
    return code, said.getvalue(), time.monotonic() - began


def forget_the_failure() -> None:
    """A job fails once in its life; this one is to fail again."""
    if not dist.is_initialized():
        return
    dist.barrier()
    if dist.get_rank() == 0:
        for key in (failure_shutdown._CLAIMS, failure_shutdown._FAILED, failure_shutdown._LEFT):
            dist.distributed_c10d._get_default_store().delete_key(key)
    dist.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    path, outcomes = Path(sys.argv[1]), []
    for line in json.loads(path.read_text()):
        outcomes.append(outcome_of(line))
        print(len(outcomes), "lines", flush=True)
        forget_the_failure()
    path.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(json.dumps(outcomes))
    if dist.is_initialized():
        dist.destroy_process_group()
