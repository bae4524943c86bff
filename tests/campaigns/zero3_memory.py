"""What ZeRO stage 3 takes in real processes: a model whose training state is several times what any of them ever has.

    python tests/campaigns/zero3_memory.py                       4 processes over gloo, twice; a minute

Prints the lines of docs/memory.md. The memory is the largest resident size that the kernel has seen (Linux), less that of the same
process training a model of one narrow layer: what torch, gloo and the optimizer take of their own. Freed memory is given back at once
(--empty-unused-memory-level 2): what a process keeps is resident whoever uses it.
"""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

RANKS = 4
SHAPE = "--num-layers 24 --hidden-size 320"
FLAGS = (
    f"{SHAPE} --num-attention-heads 5 --seq-length 32 --micro-batch-size 1 --vocab-size 1000 --bf16 "
    "--attention-dropout 0 --zero-stage 3 --mock-data --tokenizer-type NullTokenizer --train-iters 4 --lr 1e-4 --eval-iters 0 "
    "--log-interval 4 --empty-unused-memory-level 2"
)


def train() -> None:
    """One rank: trains, and says how large it has been."""
    import torch

    import pretrain_gpt
    from megatron.core.enums import ModelType

    torch.set_num_threads(1)
    pretrain_gpt.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
    )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}", flush=True)


def peaks_of(flags: str) -> list[int]:
    """The largest resident size of each process of a job, in bytes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [*launch, __file__, *flags.split()], capture_output=True, text=True, check=True, env=environment
    )
    peaks = sorted(map(int, re.findall(r"peak (\d+)", job.stdout)))  # lines of several processes may run together
    assert len(peaks) == RANKS, job.stdout
    return peaks


def report() -> list[str]:
    """Train in processes, and compare."""
    from megatron.training.memory.forecast_memory_along_schedule import forecast
    from tools.estimating.job import read

    ranks = forecast(read([*FLAGS.split(), "--world-size", str(RANKS), "--device", "cpu"]).job)
    base = max(peaks_of(FLAGS.replace(SHAPE, "--num-layers 1 --hidden-size 40")))
    rose = [peak - base for peak in peaks_of(FLAGS)]
    parameters, predicted = ranks[0].parameters, ranks[0].total
    whole = parameters * 18  # bfloat16, with gradients, masters and two moments in float32
    return [
        f"parameters                                   {parameters:>13,}",
        f"state of a rank without ZeRO, bytes          {whole:>13,}",
        f"predicted for a rank of stage 3              {predicted:>13,}",
        f"resident above the baseline, by rank         {', '.join(f'{size:,}' for size in rose)}",
        f"state without ZeRO / the most of any rank    {whole / max(rose):>13.2f}",
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train()
    else:
        print("\n".join(report()))
