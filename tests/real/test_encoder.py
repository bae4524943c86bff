"""A published encoder trains on from its folder, with its own tokenizer: transformers' hidden states, in one process and in a layout.

Skipped where the package is not among the artefacts (tests/real.sh fetches them; REAL_ARTEFACTS names another folder).
"""

import base64
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import token_files
import torch
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_bert
from megatron.convert import settings_of_foreign_folder
from megatron.core.models.common.model_rules import BERT_RULES
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer

sys.path.append(str(Path(__file__).parent))
from encoder import LENGTH, PACKAGE, RECORD, SENTENCES, artefacts, unpack

pytest.importorskip("tokenizers")

LAYOUTS = {
    "one": ({}, ""),
    "tp2pp2": ({"tp": 2, "pp": 2}, " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --eval-iters 0 --num-workers 0 --device cpu --split 1,0,0 "
    "--hidden-dropout 0 --attention-dropout 0 --seed 5"
)
TEXTS = [
    "The harbour is quiet before sunrise. A ferry waits for the first passengers. Gulls circle above the mast.",
    "Bread needs time more than anything else. Flour, water and salt are mixed in the evening. It is baked at dawn.",
    "The old library keeps maps of the coast. Some of them are older than the town. Nobody knows who drew them.",
    "Rain fell on the hills all night. The river rose by a metre. In the morning the bridge was closed.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = unpack(artefacts(), tmp_path_factory.mktemp("encoder"))
    if found is None:
        pytest.skip(f"{artefacts() / PACKAGE} is not there")
    return found


@pytest.fixture(scope="module")
def expected() -> dict:
    """What transformers has said of SENTENCES (encoder.py)."""
    record = json.loads(RECORD.read_text())
    hidden = np.frombuffer(base64.b64decode(record["hidden"]), "<f4").reshape(len(SENTENCES), LENGTH, -1)
    return record | {"hidden": torch.from_numpy(hidden.copy())}


def tokenizer_of(folder: Path):
    return build_tokenizer(TokenizerConfig(**settings_of_foreign_folder(folder)["tokenizer"]))


def test_the_folders_tokenizer_says_transformers_ids(folder: Path, expected: dict):
    tokenizer = tokenizer_of(folder)
    for text, ids, seen in zip(SENTENCES, expected["ids"], expected["seen"]):
        assert tokenizer.tokenize(text) == ids[: sum(seen)]
    assert (tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad) == (101, 102, 103, 0)


class Sentences:
    """Samples of SENTENCES, in the form of the data sets of masked words."""

    def __init__(self, record: dict):
        self.record = record

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict:
        ids, seen = (np.array(self.record[name][i % 2]) for name in ("ids", "seen"))
        masked = (np.arange(LENGTH) == 2).astype(np.int64)
        types = np.zeros_like(ids)
        return {
            "text": ids,
            "types": types,
            "labels": ids,
            "loss_mask": masked,
            "padding_mask": seen,
            "is_random": i % 2,
        }


def hidden_states(mesh: Mesh, flags: str, record: dict) -> torch.Tensor | None:
    """Of the first microbatch of the first step, [2, LENGTH, 384]; None on ranks without the last layer."""
    data = lambda num_samples: (Sentences(record), None, None)  # noqa: E731
    script = SimpleNamespace(**vars(pretrain_bert) | {"train_valid_test_datasets_provider": data}, rules=BERT_RULES)
    found: list[torch.Tensor] = []
    with trainer_of(script, mesh, flags, predicts=False) as trainer:
        module = trainer.model[-1].module
        module.language_model.register_forward_hook(lambda _, given, made: found.append(made.detach().clone()))
        trainer._train()
    is_last = mesh["pp"].rank == mesh["pp"].size - 1
    return found[0].transpose(0, 1) if is_last else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_before_the_first_step_are_transformers(layout: str, folder: Path, expected: dict):
    sizes, more = LAYOUTS[layout]
    flags = f"{FLAGS} --seq-length {LENGTH} --train-iters 1 --mock-data --load {folder}{more}"
    for hidden in run_ranks(sizes, partial(hidden_states, flags=flags, record=expected)):
        if hidden is not None:
            seen = torch.tensor(expected["seen"]).bool()
            assert (hidden - expected["hidden"])[seen].abs().max() < 1e-5


def losses_of(mesh: Mesh, flags: str) -> list[dict]:
    steps: list[dict] = []
    script = SimpleNamespace(**vars(pretrain_bert), rules=BERT_RULES)
    with trainer_of(script, mesh, flags, predicts=False) as trainer:
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        trainer._train()
    return steps


def test_it_trains_on_from_texts_of_its_own_tokenizer(folder: Path, tmp_path: Path):
    """In one process and at TP 2 x PP 2, with the same losses; those of masked words fall."""
    tokenizer = tokenizer_of(folder)
    documents = [tokenizer.tokenize_sentences(text.split(". ")) for text in TEXTS]
    data = token_files.write(tmp_path / "text", documents * 8)
    flags = f"{FLAGS} --seq-length 32 --train-iters 4 --data-path {data} --load {folder}"
    (one,) = run_ranks({}, partial(losses_of, flags=flags))
    *_, many = run_ranks({"tp": 2, "pp": 2}, partial(losses_of, flags=flags + LAYOUTS["tp2pp2"][1]))
    assert len(one) == 4 and one[-1]["lm loss"] < one[0]["lm loss"]
    for got, wanted in zip(many, one, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)
