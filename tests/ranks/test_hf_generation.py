"""Generation from folders of other projects: the ids that transformers says, token by token (tests/exchange/record.py)."""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from local_ranks import run_ranks

from megatron.core.inference.generate import generate_batch
from megatron.core.inference.load import load_gpt, lone_mesh
from megatron.core.interchange import open_foreign
from megatron.core.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig

sys.path.append(str(Path(__file__).parent.parent / "exchange"))
from cases import CASES, prompts, read_record, write_folder

FAST = ("gemma3", "smollm3")


def greedy_ids(case: str, folder: Path, mesh: Mesh) -> list[list[int]]:
    """What follows the prompts of a case, all in one batch, with the cache."""
    checkpoint = open_foreign(folder, mesh["world"])
    config = ModelConfig(**checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8})
    sizes = {"vocab_size": checkpoint.state["vocab_size"], "positions": config.max_position_embeddings}
    model, (texts, new) = load_gpt(checkpoint, config, mesh=mesh, **sizes), prompts(case)
    options = {"max_new_tokens": new, "max_length": sizes["positions"], "stop_id": None, "mesh": mesh}
    choose = [lambda scores: int(scores.argmax())] * len(texts)
    return [list(ids) for ids in zip(*generate_batch(model, texts, choose=choose, **options))]


def marks_of(case: str, layout: str) -> list[pytest.MarkDecorator]:
    """Every family in one process; a third of them over four ranks, another third than test_hf_training.py has; the rest by `-m sweep`."""
    beside = layout == "tp 2, pp 2" and list(CASES).index(case) % 3 != 1
    return [] if case in FAST else [pytest.mark.sweep] if beside else [pytest.mark.full]


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(*pair, marks=marks_of(*pair)) for pair in product(CASES, ("one process", "tp 2, pp 2"))],
)
def test_greedy_ids_are_those_of_transformers(case: str, layout: str, tmp_path: Path):
    record = read_record(case)
    write_folder(tmp_path, record)
    work = partial(greedy_ids, case, tmp_path)
    for ids in [work(lone_mesh())] if layout == "one process" else run_ranks({"tp": 2, "pp": 2}, work):
        assert ids == record["greedy"]
