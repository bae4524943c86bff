"""pretrain_t5.py from a file of sentences to its losses: every layout against one process, with ranks as threads.

Float64, so that a layout may differ from one process by rounding alone. tests/ranks/models/test_t5.py compares gradients and weights.
"""

import shlex
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import numpy as np
import pretrain_t5
import pytest
import whole_run
from documents import commands_of
from local_ranks import run_ranks
from script_run import trainer_of
from sentence_files import write_sentences
from torch import nn

from megatron.core.models.common.model_rules import T5_RULES
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.stage_to_rank import loop
from megatron.core.pipeline_parallel.layer_split import split_two_stacks
from megatron.core.pipeline_parallel.schedule.registry import stage_map
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check
from megatron.training.evaluate_window_chosen_by_iteration import evaluate

SCRIPT = SimpleNamespace(**vars(pretrain_t5), args_defaults=pretrain_t5.DEFAULTS | {"decoder_num_layers": 0})
MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --decoder-seq-length 10 --fp64 --micro-batch-size 2 "
    "--lr 1e-2 --make-vocab-size-divisible-by 8 --device cpu --clip-grad 0.5 --num-workers 0 --vocab-extra-ids 5 "
    "--global-batch-size 8 --train-iters 3 --mask-prob 0.3 --short-seq-prob 0.3 --split 8,2,0 --eval-iters 2 "
)
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
SPLIT = "--decoder-num-layers 2 --pipeline-model-parallel-size 3 --pipeline-model-parallel-split-rank "
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 1500 "
CP, LONGER = "--context-parallel-size 2 --cp-comm-type ", "--decoder-seq-length 16 "
# name: (sizes, flags, flags of one process)
LAYOUTS = {
    "tp-sp-pp-dp-zero2": ({"tp": 2, "pp": 2, "dp": 2}, TP + PP + "--sequence-parallel --zero-stage 2 " + OVERLAP, ""),
    "split 2 of 3": (
        {"pp": 3, "tp": 2},
        SPLIT + "2 --untie-embeddings-and-output-weights " + TP,
        "--decoder-num-layers 2 --untie-embeddings-and-output-weights ",
    ),
    "split 1 of 3, offloaded": (
        {"pp": 3},
        SPLIT + "1 --cpu-offloading-num-layers 1 --min-offloaded-tensor-size 0 ",
        "--decoder-num-layers 2 ",
    ),
    "zb-v-full": (
        {"pp": 2},
        PP + "--pipeline-schedule zb-v --recompute-granularity full --recompute-method uniform ",
        "",
    ),
    "packed inputs": (
        {"pp": 2, "tp": 2},
        PP
        + TP
        + "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --contiguous-checkpointing "
        "--distribute-saved-activations ",
        "",
    ),
    "dp-zero3-offloaded": ({"dp": 2}, "--zero-stage 3 --offload-params --optimizer-cpu-offload ", ""),
    "cp-p2p-tp-sp-pp-zero2": (
        {"cp": 2, "tp": 2, "pp": 2, "dp": 2},
        CP + "p2p " + TP + PP + "--sequence-parallel --zero-stage 2 " + OVERLAP,
        LONGER,
    ),
    "cp-all_gather-zb-v-full": (
        {"cp": 2, "pp": 2},
        CP + "all_gather " + PP + "--pipeline-schedule zb-v --recompute-granularity full --recompute-method uniform ",
        LONGER,
    ),
    "cp-a2a-split": (
        {"cp": 2, "pp": 3},
        CP + "a2a " + SPLIT + "2 --untie-embeddings-and-output-weights ",
        LONGER + "--decoder-num-layers 2 --untie-embeddings-and-output-weights ",
    ),
    "cp4-both-zero3": (
        {"cp": 4, "cp_heads": 2},
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --zero-stage 3 ",
        LONGER,
    ),
}

BESIDE = ("packed inputs", "dp-zero3-offloaded")  # of the sweep


@cache
def data() -> str:
    """Flags of a file of 60 documents and its vocabulary. Words follow each other in the order of the alphabet."""
    folder, rng = Path(mkdtemp(prefix="t5-")), np.random.RandomState(0)

    def documents() -> Iterator[tuple[np.ndarray, list[int]]]:
        for _ in range(60):
            lengths = rng.randint(1, 7, rng.randint(1, 9)).tolist()
            yield (5 + rng.randint(30) + np.arange(sum(lengths))) % 39 + 5, lengths

    return " ".join([*write_sentences(folder, documents(), words=30, pieces=9), f"--data-cache-path {folder}/cache "])


def train(mesh: Mesh, flags: str) -> tuple[list, dict[str, float]]:
    """(losses of each step, losses of a validation) of this rank's whole run."""
    with trainer_of(SCRIPT, mesh, MODEL + data() + flags, predicts=False) as trainer:
        steps = []
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        trainer._train()
        validation = evaluate(
            trainer.pipeline,
            partial(trainer._iterators, "valid", trainer.datasets["valid"][0].samples),
            num_microbatches=2 * trainer.pipeline.batch.num_microbatches,
            first_sample=0,
        )
        return steps, validation


@cache
def one_process(flags: str) -> tuple[list, dict[str, float]]:
    return run_ranks({}, partial(train, flags=flags))[0]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.sweep if x in BESIDE else pytest.mark.full) for x in LAYOUTS]
)
def test_every_layout_trains_as_one_process(layout: str):
    """With dropout."""
    sizes, flags, alone = LAYOUTS[layout]
    expected_steps, expected = one_process(alone)
    where = {"stages": stage_map("zb-v", 2, 2)} if "zb-v-full" in layout else {}
    longer = LONGER if LONGER in alone else ""  # a part of the decoder's text for each rank
    ranks = run_ranks(sizes, partial(train, flags=longer + flags), **where)
    steps, validation = ranks[0 if where else -1]  # the last stage of zb-v is on the first rank
    for got, losses in zip(steps, expected_steps, strict=True):
        assert got == pytest.approx(losses, rel=1e-10)
    assert validation == pytest.approx(expected, rel=1e-10)
    # The vocabulary of the file, [BOS], [EOS] and the sentinels.
    assert expected_steps[0]["lm loss"] == pytest.approx(np.log(46 + 5), rel=0.05)


@pytest.mark.parametrize(
    ("stacks", "last"),
    [
        ("--num-layers 3 --decoder-num-layers 1 --pipeline-model-parallel-split-rank 1", (False, True)),
        ("--num-layers 3 --decoder-num-layers 1", (True, True)),
    ],
)
def test_a_provider_with_megatrons_arguments_is_told_which_stacks_its_stage_has(stacks: str, last: tuple[bool, bool]):
    """A fork's provider over two stages: split where the decoder begins, or two layers each."""
    told = {}

    def model_provider(
        pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
    ) -> nn.Module:
        stage = pretrain_t5.model_provider(pre_process, post_process)
        model = stage.language_model
        told[pre_process, post_process] = add_encoder, add_decoder
        assert add_encoder == (model.encoder is not None) and add_decoder == (model.decoder is not None)
        return stage

    script = SimpleNamespace(**(vars(SCRIPT) | {"model_provider": model_provider}))
    flags = f"{MODEL}{data()}{PP}{stacks}"

    def build(mesh: Mesh) -> None:
        with trainer_of(script, mesh, flags, predicts=False):
            pass

    run_ranks({"pp": 2}, build)
    assert told == {(True, False): (True, False), (False, True): last}


def test_the_encoder_has_the_ranks_before_the_split():
    assert split_two_stacks(4, 6, loop(4), 1) == [range(4), range(4, 6), range(6, 8), range(8, 10)]
    assert split_two_stacks(4, 2, loop(3), 2) == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(ValueError, match="encoder to 3 ranks"):
        split_two_stacks(4, 2, loop(4), 3)
    with pytest.raises(ValueError, match="leaves no rank"):
        split_two_stacks(4, 2, loop(4), 4)


@pytest.mark.full
def test_the_commands_of_the_page_train(capsys):
    """The first for two steps on a small file; the second, of eight ranks, is read by the script's rules."""
    first, second, _ = commands_of(Path(__file__).parents[3] / "docs" / "t5.md")
    there = dict(zip(shlex.split(data())[::2], shlex.split(data())[1::2]))
    files = {"data/docs_text_sentence": there["--data-path"], "vocab.txt": there["--vocab-file"]}
    words = [files.get(word, word) for word in shlex.split(first)[2:]]
    more = "--train-iters 2 --lr-warmup-iters 1 --eval-iters 1 --device cpu --log-interval 1 --split 80,20,0 --data-cache-path "
    more += there["--data-cache-path"]
    whole_run.run([*words, *more.split()], tiny=[], script=pretrain_t5, args_defaults=pretrain_t5.DEFAULTS)
    assert capsys.readouterr().out.count("| lm loss: ") == 2
    words = [files.get(word, word) for word in shlex.split(second)[4:] if word != "pretrain_t5.py"]
    parsed = parse_args(words, args_defaults=SCRIPT.args_defaults).config
    check(parsed, 8)
    assert T5_RULES.problems(parsed, build_tokenizer(parsed.tokenizer)) == []
    assert parsed.layer_split == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
