"""Long samples that ranks share, trained by pretrain_gpt.py over processes: to one process's losses and gradient norms."""

import random
from collections.abc import Sequence
from functools import partial
from shlex import split

from processes import PRETRAIN_GPT, Outcome, run

VOCAB = 96
_MODEL = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --position-embedding-type rope --init-method-std 0.2 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 1 --global-batch-size 1 --train-iters 3 --lr 1e-2 --log-interval 1 --eval-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --split 100,0,0 --device cpu"
)
SHARED = {  # 4 ranks
    "cp 4": split("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"),
    "cp 2 x tp 2": split(
        "--context-parallel-size 2 --hierarchical-context-parallel-sizes 1 2 --tensor-model-parallel-size 2"
    ),
}
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def documents(tokens: int, seed: int = 5) -> list[list[list[int]]]:
    """Documents of one sequence each, of `tokens` in all and an end each, in which whole passages come again: a model that attends
    to the wrong rows has another loss."""
    dice, found, count = random.Random(seed), [], 0
    while count < tokens:
        passage = [dice.randrange(VOCAB - 2) for _ in range(dice.randint(20, 300))]
        found.append([(passage * dice.randint(1, 6))[: tokens - count] + [VOCAB - 2]])
        count += len(found[-1][0])
    return found


def trained(prefix: str, length: int, flags: Sequence[str] = (), ranks: int = 1, timeout: float = 120) -> Outcome:
    """Three steps on the token files at `prefix`."""
    given = [PRETRAIN_GPT, *_MODEL, "--seq-length", str(length), "--data-path", prefix, *flags]
    return run(given, ranks, timeout=timeout).succeeded()


class Text:
    """Token files, and what one process makes of their samples of `length` tokens. timeout: of each run, in seconds."""

    def __init__(self, prefix: str, length: int, timeout: float = 120):
        self._run = partial(trained, prefix, length, timeout=timeout)
        self._alone = self._run()

    def assert_shared(self, sharing: str, *kinds: str) -> Outcome:
        """Four processes that share the samples train to the losses of one. kinds: how all layers communicate, or each does."""
        got = self._run([*SHARED[sharing], "--cp-comm-type", *kinds], ranks=4)
        print(f"{sharing}, {kinds}: {[(a.loss, b.loss) for a, b in zip(got.training, self._alone.training)]}")
        assert_close(got, self._alone)
        return got


def assert_close(got: Outcome, alone: Outcome) -> None:
    """Three losses within 2e-4, and gradient norms within a thousandth. float32, of which sums in another order keep 6 digits."""
    assert len(got.training) == len(alone.training) == 3
    for here, there in zip(got.training, alone.training):
        assert abs(here.loss - there.loss) <= 2e-4, (here, there)
        assert abs(here.grad_norm - there.grad_norm) <= 1e-3 * there.grad_norm + 5e-4, (here, there)
