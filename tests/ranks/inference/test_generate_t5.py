"""tools/generate.py with a T5: its encoder reads the prompt, its decoder writes; what is written is what the plain model says."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pretrain_t5
import pytest
import torch
import whole_run
from cases import prompts, read_record, write_folder
from local_ranks import run_ranks
from said import tells
from sentence_files import write_sentences
from tiny_run import SEQ, VOCAB, Layout, build_chunks
from tiny_t5 import CONFIGS, DECODER, T5

from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.inference import load_t5, read_saved_settings
from megatron.core.inference.generate_t5 import answer_batch
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers import build_tokenizer
from tools import checkpoint_convert
from tools.generate import main

pytest.importorskip("tokenizers")

# ---------------------------------------------------------------- scores of each step, in any layout

PROMPTS = [[3], [7, 1, 4, 0, 2, 9, 9, 5], [60, 2, 9, 9, 5]]
AFTER = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]  # what is "drawn", whatever the scores
START = 1


def plain_scores(model: str) -> list[list[torch.Tensor]]:
    """Of each text and step: the scores from a forward over the texts so far, alone, of one process without a cache."""
    whole = build_chunks(single_rank_mesh(), CONFIGS[model], Layout(), subject=T5)[0][0].module.eval()
    scores: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for prompt, after in zip(PROMPTS, AFTER):
            read, ids = torch.tensor([prompt]), [START, *after]
            said = (torch.tensor([ids[: step + 1]]) for step in range(len(after)))
            scores.append([whole(read, words, torch.ones_like(read))[0, -1, :VOCAB] for words in said])
    return scores


def forced(mesh: Mesh, model: str) -> list[list[torch.Tensor]]:
    """The scores that this rank was asked to draw from, by text and step."""
    seen: list[list[torch.Tensor]] = [[] for _ in PROMPTS]

    def draw(scores: torch.Tensor, text: int) -> int:
        seen[text].append(scores)
        return AFTER[text][len(seen[text]) - 1]

    stages, _, _ = build_chunks(mesh, CONFIGS[model], Layout(pp=mesh["pp"].size), subject=T5)
    steps = answer_batch(
        stages[mesh["pp"].rank].module,
        PROMPTS,
        start_id=START,
        max_new_tokens=3,
        stop_id=None,
        mesh=mesh,
        choose=[partial(draw, text=text) for text in range(len(PROMPTS))],
    )
    assert [list(step) for step in zip(*steps)] == AFTER, "every rank learns every id"
    return seen


LAYOUTS = [(1, 1), (2, 2), (4, 1), (1, 4)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        pytest.param(model, tp, pp, marks=[pytest.mark.full] * ((model, tp) not in (("t5", 2), ("learned", 1))))
        for model in CONFIGS
        for tp, pp in LAYOUTS
    ],
)
def test_scores_of_each_step_equal_the_plain_forward(model: str, tp: int, pp: int):
    """Of prompts of different lengths in one batch, for each alone."""
    ranks = run_ranks({"tp": tp, "pp": pp}, partial(forced, model=model), delayed=True)
    for rank, seen in enumerate(ranks):
        if rank < tp * (pp - 1):
            assert seen == [[], [], []], "only the last stage draws"
            continue
        for got, want in zip(seen, plain_scores(model), strict=True):
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() <= 1e-10 * b.abs().max()


def test_what_a_decoder_cannot_do_is_said_before_it_begins():
    def work(mesh: Mesh) -> None:
        model = build_chunks(mesh, CONFIGS["t5"], Layout(sp=True), subject=T5)[0][0].module
        options = {"max_new_tokens": 0, "stop_id": None, "choose": [len], "mesh": mesh}
        with pytest.raises(ValueError, match="sequence") as error:
            answer_batch(model, [[1], [VOCAB]], start_id=VOCAB, **options)
        assert tells(error.value, f"max_new_tokens 0 2 {VOCAB} {VOCAB - 1} first")

    run_ranks({"tp": 2}, work)


# ---------------------------------------------------------------- the tool

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --decoder-seq-length 10 --micro-batch-size 4 "
    "--train-iters 3 --lr 1e-2 --eval-iters 0 --device cpu --split 100,0,0 --vocab-extra-ids 4 --mask-prob 0.3 --fp64 "
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of short trainings on sentences: "relative", and "learned" with positions of a table."""
    root = tmp_path_factory.mktemp("t5")
    draw = np.random.RandomState(0)
    lengths = [draw.randint(2, 7, draw.randint(1, 6)).tolist() for _ in range(20)]
    data = write_sentences(root, [(5 + np.arange(sum(one)) % 30, one) for one in lengths], words=30, pieces=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        for kind, more in {"relative": "", "learned": "--position-embedding-type learned_absolute"}.items():
            words = [*shlex.split(FLAGS + more), *data, "--save", str(root / kind)]
            whole_run.run(words, tiny=[], script=pretrain_t5, args_defaults=pretrain_t5.DEFAULTS)
    return root


@pytest.fixture
def tool(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the tool run with these arguments."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["--device", "cpu", *map(str, arguments)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


def by_hand(folder: Path, prompt: list[int], count: int) -> tuple[str, list[int]]:
    """What the model writes, and its ids: each the highest score behind the words so far."""
    checkpoint = open_checkpoint(folder)
    settings = read_saved_settings(checkpoint.state, str(folder))
    sizes = {"vocab_size": settings.vocab_size, "positions": settings.positions}
    model, tokenizer = load_t5(checkpoint, settings.transformer, **sizes), build_tokenizer(settings.tokenizer)
    read, ids = torch.tensor([prompt]), [tokenizer.bos]
    for _ in range(count):
        with torch.no_grad():
            scores = model(read, torch.tensor([ids]), torch.ones_like(read))[0, -1, : settings.vocab_size]
        if scores.argmax() == tokenizer.eos:
            break
        ids.append(int(scores.argmax()))
    return tokenizer.detokenize(ids[1:]), ids[1:]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["relative", pytest.param("learned", marks=pytest.mark.full)])
def test_the_decoder_writes_what_the_plain_model_says(saved: Path, tool, kind: str, tmp_path: Path):
    """A sentinel in a prompt is one id: vocabulary of 5 special tokens, 30 words, 9 ends of words, [BOS], [EOS], 4 sentinels."""
    flags = ("--load", saved / kind, "--prompt", "w01 w02 <extra_id_0> w05", "--greedy", "--max-new-tokens", 8)
    text, ids = by_hand(saved / kind, [6, 7, 46, 10], 8)
    assert len(ids) > 2
    code, out, err = tool(*flags)
    assert (code, out) == (0, f"{text}\n") and "iteration 3 of" in err
    genfile = tmp_path / "out.jsonl"
    more = ("--prompt", "w09", "--batch-size", 2, "--genfile", genfile)
    assert tool(*flags, *more)[0] == 0
    first, second = map(json.loads, genfile.read_text().splitlines())
    assert first == {"prompt": flags[3], "text": text, "length": len(ids), "finished": len(ids) < 8}
    assert second["text"] == by_hand(saved / kind, [14], 8)[0]
    assert tool(*flags, "--recompute")[1] == out
    assert tool(*flags, "--model", "t5")[1] == out, "built by the model_provider of pretrain_t5.py"


def test_samples_depend_on_their_seed_alone(saved: Path, tool):
    flags = ("--load", saved / "relative", "--prompt", "w01 w02", "--max-new-tokens", 8, "--temperature", 1.5)
    flags += ("--top-k", 20, "--top-p", 0.9)
    first = tool(*flags, "--seed", 7)[1]
    assert tool(*flags, "--seed", 7)[1] == first != tool(*flags, "--seed", 8)[1]
    many = tool(*flags, "--seed", 7, "--num-samples", 3, "--batch-size", 3)[1].splitlines()
    assert many[1] == first.rstrip("\n") and len(set(many[1::2])) == 3


@pytest.mark.parametrize(
    ("kind", "flags", "named", "wanted"),
    [
        ("relative", ("--prompt", " "), "prompt empty", 1),
        ("learned", ("--prompt", "w01", "--max-new-tokens", 17), "--max-new-tokens 17 16", 2),
        ("learned", ("--prompt", "w01 " * 17), "17 16", 1),
        ("relative", ("--prompt", "w01", "--decoder-start-token-id", 99), "99 49", 1),
    ],
)
def test_what_cannot_be_written_is_refused(saved: Path, tool, kind: str, flags: tuple, named: str, wanted: int):
    code, out, err = tool("--load", saved / kind, *flags)
    assert (code, out) == (wanted, "") and tells(err, named), err


def test_a_folder_of_transformers_writes_its_ids(tool, tmp_path: Path):
    """From the command line, with numbers for words; the ids that transformers says to the prompt of seven (record.py). A text
    ends before the folder's eos_token_id; without one it goes on, as the recorded texts do."""
    record = read_record("t5-gated")
    ids, end = record["greedy"][2], record["config"]["eos_token_id"]
    write_folder(tmp_path / "hf", record)
    write_folder(tmp_path / "endless", record | {"config": record["config"] | {"eos_token_id": None}})
    words = " ".join(map(str, prompts("t5-gated")[0][2]))
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 30)
    for folder, expected in (("hf", ids[: ids.index(end)]), ("endless", ids)):
        flags = ("--load", tmp_path / folder, *tokenizer, "--prompt", words, "--greedy", "--max-new-tokens", 14)
        code, out, err = tool(*flags)
        assert (code, [int(word) for word in out.split()]) == (0, expected), err


@pytest.mark.full
def test_the_id_that_a_folder_begins_texts_with_is_taken_and_kept(tool, tmp_path: Path):
    record = read_record("t5-gated")
    write_folder(tmp_path / "zero", record)
    write_folder(tmp_path / "three", record | {"config": record["config"] | {"decoder_start_token_id": 3}})
    flags = (
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        30,
        "--prompt",
        "1 2 3",
        "--greedy",
        "--max-new-tokens",
        8,
    )
    wanted = tool("--load", tmp_path / "zero", *flags, "--decoder-start-token-id", 3)[:2]
    assert tool("--load", tmp_path / "three", *flags)[:2] == wanted != tool("--load", tmp_path / "zero", *flags)[:2]
    assert checkpoint_convert.main(["--load", str(tmp_path / "three"), "--save-hf", str(tmp_path / "again")]) == 0
    assert tool("--load", tmp_path / "again", *flags)[:2] == wanted
    write_folder(tmp_path / "none", record | {"config": record["config"] | {"decoder_start_token_id": 31}})
    code, _, err = tool("--load", tmp_path / "none", *flags)
    assert code == 1 and tells(err, "decoder_start_token_id 31 vocab_size")


def test_a_gpts_flags_stay_a_gpts(tool, tmp_path: Path):
    write_folder(tmp_path / "hf", read_record("gpt2"))
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 30)
    code, _, err = tool("--load", tmp_path / "hf", *tokenizer, "--prompt", "1", "--decoder-start-token-id", 0)
    assert code == 1 and tells(err, "--decoder-start-token-id")


assert SEQ > 5 and DECODER > 3, "the prompts and what is forced fit the tables of positions"
