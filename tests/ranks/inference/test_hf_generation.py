"""Generation from folders of other projects: the ids that transformers says, token by token (tests/support/exchange/record.py)."""

import math
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from cases import CASES, T5_CASES, prompts, read_record, write_folder
from local_ranks import run_ranks
from torch import Tensor

from megatron.convert import open_foreign
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.generate_t5 import answer_batch
from megatron.core.inference.load_model import load_gpt, load_t5, single_rank_mesh
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig

FAST = ("gemma3", "smollm3", "t5")
NAMES = [*CASES, *T5_CASES]


class Greedy:
    """The id with the highest score, or of those that the text has not; its texts begin with id 0."""

    def __init__(self, *, each_once: bool):
        self.each_once, self.said = each_once, [0]

    def __call__(self, scores: Tensor) -> int:
        scores = scores.clone()
        if self.each_once:
            scores[self.said] = -math.inf
        self.said.append(int(scores.argmax()))
        return self.said[-1]


def greedy_ids(case: str, folder: Path, mesh: Mesh, use_cache: bool = True, each_once: bool = False) -> list[list[int]]:
    """What follows the prompts of a case, all in one batch."""
    checkpoint = open_foreign(folder, mesh["world"])
    config = ModelConfig(**checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8})
    sizes = {"vocab_size": checkpoint.state["vocab_size"], "positions": config.max_position_embeddings}
    texts, new = prompts(case)
    options = {"max_new_tokens": new, "stop_id": None, "mesh": mesh, "use_cache": use_cache}
    options["choose"] = [Greedy(each_once=each_once) for _ in texts]
    if case in T5_CASES:
        steps = answer_batch(load_t5(checkpoint, config, mesh=mesh, **sizes), texts, start_id=0, **options)
    else:
        model = load_gpt(checkpoint, config, mesh=mesh, **sizes)
        steps = generate_batch(model, texts, max_length=sizes["positions"], **options)
    return [list(ids) for ids in zip(*steps)]


def marks_of(case: str, layout: str) -> list[pytest.MarkDecorator]:
    """Every family in one process; a third of them over four ranks, another third than test_hf_training.py has; the rest by `-m sweep`."""
    beside = layout == "tp 2, pp 2" and NAMES.index(case) % 3 != 1
    return [] if case in FAST else [pytest.mark.sweep] if beside else [pytest.mark.full]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(*pair, marks=marks_of(*pair)) for pair in product(NAMES, ("one process", "tp 2, pp 2"))],
)
def test_greedy_ids_are_those_of_transformers(case: str, layout: str, tmp_path: Path):
    record = read_record(case)
    write_folder(tmp_path, record)
    work = partial(greedy_ids, case, tmp_path)
    for ids in [work(single_rank_mesh())] if layout == "one process" else run_ranks({"tp": 2, "pp": 2}, work):
        assert ids == record["greedy"]


@pytest.mark.full
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=["one process", "tp 2, pp 2"])
@pytest.mark.parametrize("case", T5_CASES)
def test_a_decoder_that_says_each_id_once_says_those_of_transformers(
    case: str, layout: dict, use_cache: bool, tmp_path: Path
):
    """A tiny T5 repeats itself; made to go on, it says an id of each step's own scores."""
    record = read_record(case)
    write_folder(tmp_path, record)
    for ids in run_ranks(layout, partial(greedy_ids, case, tmp_path, use_cache=use_cache, each_once=True)):
        assert ids == record["each once"]


def test_a_step_of_a_decoder_moves_one_token_and_neither_the_encoders_text_nor_its_result(tmp_path: Path):
    """Bytes of the calls of a step, by the algebra: three sums in each of two layers, and one of the embedding, over t = 2."""
    write_folder(tmp_path, read_record("t5"))

    def work(mesh: Mesh) -> list:
        checkpoint = open_foreign(tmp_path, mesh["world"])
        config = ModelConfig(**checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8})
        model = load_t5(checkpoint, config, mesh=mesh, vocab_size=31, positions=None)
        options = {"max_new_tokens": 2, "start_id": 0, "stop_id": None, "choose": [lambda scores: 4], "mesh": mesh}
        steps = answer_batch(model, [[1, 2, 3]], **options)
        next(steps)
        with mesh.ledger.record() as calls:
            next(steps)
        return [(call.op, call.axis, call.bytes) for call in calls]

    h, v = 24 * 8, 32 * 8  # bytes of a token's hidden state, and of its scores with padding to 4 x 8 words
    first, _, last, _ = run_ranks({"tp": 2, "pp": 2}, work)
    assert first == [("all_reduce", "tp", h), ("send", "pp_forward", h // 2), ("broadcast", "mp", 8)]
    assert last == [
        ("recv", "pp_forward", h // 2),
        ("all_gather", "tp", h // 2),
        *[("all_reduce", "tp", h)] * 6,
        ("all_gather", "tp", v // 2),
        ("broadcast", "mp", 8),
    ]
