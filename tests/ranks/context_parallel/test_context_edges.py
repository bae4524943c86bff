"""Context parallelism where sizes are odd: groups of one rank, few key/value heads, narrow windows, short documents."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from tiny_run import GPT, LLAMA, SEQ, Layout, Outcome, assert_equal, run, sample

from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.transformer.model_config import ModelConfig

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
SETTINGS = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
TWO = replace(LLAMA, num_layers=2, group_query_attention=True, num_query_groups=1)


def assert_as_one_process(model: ModelConfig, layout: Layout, batch: int = 4) -> None:
    """float64: every loss, norm, gradient and weight of two steps to 1e-10 of a tensor's largest value."""
    options = {"global_batch": batch, "steps": 2, "optimizer": SETTINGS}
    assert_equal(run(model, layout, **options), _alone(model, batch), 1e-10)


@cache
def _alone(model: ModelConfig, batch: int) -> Outcome:
    return run(model, Layout(), global_batch=batch, steps=2, optimizer=SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_neighbours_of_a2a_p2p_may_be_one_rank_or_all(heads: int):
    """The ring is then of all ranks, or of one."""
    assert_as_one_process(TWO, Layout(cp=4, cp_types=("a2a+p2p",), cp_heads=heads))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_share_one_key_value_head_under_a_window_narrower_than_a_chunk(kind: str):
    """Two ranks of tensor parallelism share it too. SEQ is 8: with cp 2 a chunk has 2 rows, and a row sees itself and one before."""
    assert SEQ == 8
    model = replace(TWO, window_size="1,0")
    assert_as_one_process(model, Layout(cp=2, tp=2, cp_types=(kind,), cp_heads=1))
    assert_as_one_process(replace(model, window_size="0,0"), Layout(cp=4, cp_types=(kind,), cp_heads=2))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_the_same_when_attention_is_computed_again(kind: str):
    model = replace(TWO, hidden_dropout=0.1, attention_dropout=0.1)
    for recompute in ("selective", "uniform 1"):
        layout = Layout(cp=2, cp_types=(kind,), cp_heads=2, recompute=recompute, m=2)
        assert_as_one_process(model, layout, batch=8)  # microbatches of 4 samples


def of_documents(length: int, number: int, texts: object) -> dict[str, torch.Tensor]:
    """Sample `number`, of documents of so many tokens each."""
    return sample(number) | {"documents": torch.arange(SEQ) // length}


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_one_token_and_those_that_end_with_a_chunk_see_themselves_alone(kind: str, length: int):
    """SEQ is 8: chunks have 2 tokens at cp 2, and 1 at cp 4."""
    subject = replace(GPT, sample=partial(of_documents, length))
    options = {"global_batch": 4, "steps": 1, "subject": subject}
    alone = run(TWO, Layout(), **options)
    assert alone.losses != run(TWO, Layout(), global_batch=4, steps=1).losses
    for ranks in (2, 4):
        layout = Layout(cp=ranks, cp_types=(kind,), cp_heads=2)
        assert_equal(run(TWO, layout, **options), alone, 1e-10)
