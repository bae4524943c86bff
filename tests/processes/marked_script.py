"""pretrain_gpt.py, or with --own-group a script that has made its process group itself, which prints where it is: a rank can be killed there.

Each line is `mark WHAT rank R process P`, at once. tests/campaigns/kill_campaign.py runs it, over every launcher.

    LATE=2:1.5     rank 2 comes a second and a half after the others
"""

import os
import sys
import time
from pathlib import Path


def mark(what: str) -> None:
    sys.stdout.write(f"mark {what} rank {os.environ.get('RANK', 0)} process {os.getpid()}\n")
    sys.stdout.flush()


mark("importing")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import torch.distributed as dist  # noqa: E402

import pretrain_gpt  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.parallel import init_and_destroy_distributed as job, initialize_model_parallel  # noqa: E402
from megatron.training import pretrain, trainer, training  # noqa: E402
from megatron.training.checkpointing import non_persistent_checkpoint, save_and_load_run_state  # noqa: E402


def marked(holder: object, name: str, what: str, *, after: str | None = None) -> None:
    """From now on `holder.name` is announced when it is called, and when it has returned."""
    function = getattr(holder, name)

    def announced(*arguments, **options):
        mark(what)
        result = function(*arguments, **options)
        if after:
            mark(after)
        return result

    setattr(holder, name, announced)


if __name__ == "__main__":
    late, _, seconds = os.environ.get("LATE", "").partition(":")
    if late == os.environ.get("RANK"):
        time.sleep(float(seconds))
    if "--own-group" in sys.argv:
        sys.argv.remove("--own-group")
        dist.init_process_group("gloo")
    mark("settings")
    marked(job, "_open_client", "opening its line", after="meeting")
    marked(dist, "init_process_group", "connecting", after="agreeing")
    marked(initialize_model_parallel, "build_mesh", "making groups", after="initialising")
    marked(training, "Trainer", "building")
    marked(save_and_load_run_state, "load", "loading", after="making ready")
    marked(trainer, "train_step", "training")
    marked(trainer, "evaluate", "evaluating", after="going on")
    marked(save_and_load_run_state, "save", "saving", after="going on")
    marked(non_persistent_checkpoint, "save_local_checkpoint", "copying", after="going on")
    marked(training.parallel_state, "stop_distributed", "leaving", after="left")
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
    )
    mark("ending")
