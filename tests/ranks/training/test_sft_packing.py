"""Packed examples compute what they compute alone, and how they are packed over micro batches and ranks changes no gradient."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT, SEQ, TINY_GPT2, TINY_LLAMA, VOCAB, Layout, Outcome, Subject, assert_equal, build_chunks, run
from torch import Tensor

from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.parallel.mesh import Mesh

_MODELS = [pytest.param("llama"), pytest.param("gpt2", marks=pytest.mark.full)]
MODELS = {"llama": TINY_LLAMA, "gpt2": replace(TINY_GPT2, hidden_dropout=0.0, attention_dropout=0.0)}
LENGTHS = [
    4,
    6,
    5,
    5,
    9,
    3,
    7,
    2,
    8,
    6,
    2,
    2,
    3,
    5,
    9,
]  # tokens, of which a sample takes one less; packed into 8 samples
PACKED = 8


@dataclass(eq=False)
class Examples:
    """Drawn examples, of which the second half gives loss."""

    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, k: int, rules: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.RandomState(k).randint(0, VOCAB, self.lengths[k])
        return tokens, (np.arange(len(tokens)) >= len(tokens) // 2).astype(np.float32)


@cache
def dataset(packs: bool) -> SFTDataset:
    return SFTDataset(Examples(np.array(LENGTHS)), SEQ, None, seed=1, packs=packs, shuffles=False)


def sample(number: int, texts: Any, *, packs: bool) -> dict[str, Tensor]:
    """One of an epoch, in tensors; behind the epoch an empty one, which fills a batch."""
    data = dataset(packs)
    item = data[min(number, len(data) - 1)]
    names = {"mask": "loss_mask", "positions": "position_ids", "documents": "document_ids"}
    row = {name: torch.from_numpy(item[names.get(name, name)]) for name in ("tokens", "labels", *names)}
    return row | {"mask": row["mask"].double() * (number < len(data))}


@pytest.mark.parametrize("model", _MODELS)
def test_packed_answers_have_the_logits_they_have_alone(model: str):
    def work(mesh: Mesh) -> None:
        chunks, _, _ = build_chunks(mesh, MODELS[model], Layout())
        stage = chunks[0].module.eval()
        alone = dataset(False)
        number = 0
        for i in range(PACKED):
            packed = dataset(True)[i]
            tokens, positions, documents = (
                torch.from_numpy(packed[name])[None] for name in ("tokens", "position_ids", "document_ids")
            )
            with torch.no_grad():
                logits = stage(tokens, positions, Documents(documents))  # [1, s, v]
            for document in range(len(dataset(True)._samples_of(0)[i])):
                own = documents[0] == document
                item = alone[number]
                length = LENGTHS[number] - 1
                with torch.no_grad():
                    expected = stage(torch.from_numpy(item["tokens"][:length])[None], torch.arange(length)[None], None)
                torch.testing.assert_close(logits[:, own], expected, rtol=0, atol=1e-12)
                number += 1
        assert number == len(LENGTHS)

    run_ranks({}, work)


@cache
def trained(model: str, packs: bool, layout: Layout = Layout(m=1)) -> Outcome:  # noqa: B008  (frozen)
    """One step over an epoch."""
    subject = Subject(GPT.make, GPT.forward_step, partial(sample, packs=packs))
    return run(MODELS[model], layout, subject=subject, steps=1, global_batch=PACKED if packs else 16)


ZERO = DataParallelConfig(zero_stage=3, overlap_grad_reduce=True)
ARRANGEMENTS = {
    "one by one": (False, Layout(m=16)),
    "packed over micro batches and ranks": (True, Layout(dp=2, m=4)),
    "alone over ranks": (False, Layout(dp=4, m=2, data_parallel=ZERO)),
    "packed over parts of a sample": (True, Layout(cp=2, m=2)),
    "alone over parts of a sample": (False, Layout(cp=2, tp=2, sp=True, m=4)),
    "packed over stages": (True, Layout(pp=2, m=8, schedule="zb-h1")),
}


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i < 2 else [pytest.mark.sweep]) for i, name in enumerate(ARRANGEMENTS)]
)
def test_gradients_do_not_depend_on_how_examples_are_packed(name: str, model: str):
    assert len(dataset(True)) == PACKED and len(dataset(False)) == len(LENGTHS)
    packs, layout = ARRANGEMENTS[name]
    got, expected = trained(model, packs, layout), trained(model, True)
    # but for the weights: Adam's first step is a sign, also of a rounding error
    assert_equal(replace(got, weights={}), replace(expected, weights={}), 1e-12)
