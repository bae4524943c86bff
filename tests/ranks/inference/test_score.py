"""Log-probabilities of continuations: those of one plain forward a request, however requests are batched, in any layout."""

import random
from dataclasses import replace

import pytest
import torch
from expert_models import LLAMA as EXPERTS
from local_ranks import run_ranks
from tiny_run import TINY_GPT2, TINY_LLAMA, VOCAB

from megatron.core.inference.load_model import even_layers, single_rank_mesh
from megatron.core.inference.score import deal, packed_batches, padded_batches, rows_of, score
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.attention.document_and_window_masks import PrefixTrees, QueriesOfTrees
from megatron.core.ops.attention.kernels import KERNELS
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.make_chunks_optimizer_and_pipeline import tie_embeddings

LENGTH = 40
MODELS = {
    "gpt2": TINY_GPT2,
    "llama": TINY_LLAMA,
    "window": replace(TINY_LLAMA, window_size="3,0"),
    "soft cap": replace(TINY_LLAMA, attn_logit_softcapping=2.0),
    "experts": replace(EXPERTS, moe_token_dispatcher_type="alltoall"),
    "relative": replace(TINY_GPT2, position_embedding_type="relative"),
}


def build(config: ModelConfig, mesh: Mesh, *, packs: bool) -> GPTModel:
    """This rank's stage with the same weights in every layout."""
    stages = mesh.stages
    (stage,) = stages.of_rank(mesh["pp"].rank)
    model = GPTModel(
        config,
        vocab_size=VOCAB,
        positions=LENGTH,
        layers=even_layers(config.all_layers, stage, stages.last + 1),
        context=LayerContext.from_mesh(mesh, config.params_dtype, restarts_positions=packs),
        pre_process=stage == 0,
        post_process=stage == stages.last,
    )
    initialize_parameters(model, 3, mesh)
    if stages.last > 0:
        tie_embeddings({stage: model})
    return model


def requests_for(model: GPTModel) -> list[tuple[list[int], list[int]]]:
    """Questions with choices of 0 to 8 tokens, some too long for the model, and what the model says greedily."""
    rng = random.Random(1)
    requests = []
    for _ in range(6):
        context = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, LENGTH))]
        requests += [(context, [rng.randrange(VOCAB) for _ in range(rng.randrange(9))]) for _ in range(3)]
    for context, _ in requests[:6:3]:
        said = []
        for _ in range(4):
            said.append(int(plain_logprobs(model, context + said)[-1].argmax()))
        requests += [(context, said), (context, [*said[:3], (said[3] + 1) % VOCAB])]
    return requests


def plain_logprobs(model: GPTModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids[-LENGTH:]]), torch.arange(len(ids[-LENGTH:]))[None], None)
    return logits[0, :, :VOCAB].log_softmax(dim=-1)


def plain_scores(model: GPTModel, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """One forward for each request."""
    scores = []
    for context, continuation in requests:
        logprobs = plain_logprobs(model, (context + continuation)[:-1])[-len(continuation) or 10**6 :]
        at_targets = sum(float(row[target]) for row, target in zip(logprobs, continuation))
        scores.append((at_targets, logprobs.argmax(-1).tolist()[: len(continuation)] == continuation))
    return scores


def check(got: list, expected: list[tuple[float, bool]]) -> None:
    assert [pair[1] for pair in got] == [pair[1] for pair in expected]
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, expected, strict=True)) < 1e-10


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *(pytest.param(n, marks=pytest.mark.full) for n in ("window", "soft cap", "relative"))]
)
def test_scores_are_those_of_one_forward_each(name: str):
    config = MODELS[name]
    model = build(config, single_rank_mesh(), packs=False)
    requests = requests_for(model)
    expected = plain_scores(model, requests)
    assert {is_greedy for (_, is_greedy), (_, said) in zip(expected, requests) if said} == {True, False}
    packing = build(config, single_rank_mesh(), packs=config.position_embedding_type != "relative")
    for batch_tokens in (1, 90, 10**6):
        check(score(packing, requests, max_length=LENGTH, batch_tokens=batch_tokens), expected)
        check(score(model, requests, max_length=LENGTH, batch_tokens=batch_tokens), expected)


LAYOUTS = [
    ("gpt2", {"tp": 4}),
    ("gpt2", {"pp": 2, "cp": 2}),
    ("llama", {"tp": 2, "pp": 2, "dp": 2}),
    ("llama", {"cp": 2, "dp": 2}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
    ("experts", {"dp": 4, "ep": 2}),
    pytest.param("experts", {"pp": 2, "cp": 2, "dp": 2, "ep": 4}, marks=pytest.mark.sweep),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_any_layout_gives_what_one_process_gives(name: str, layout: dict[str, int]):
    config = MODELS[name]
    model = build(config, single_rank_mesh(), packs=True)
    requests = requests_for(build(config, single_rank_mesh(), packs=False))
    expected = score(model, requests, max_length=LENGTH, batch_tokens=90)

    def work(mesh: Mesh) -> list:
        stage = build(config, mesh, packs="cp" not in layout)
        return score(stage, requests, max_length=LENGTH, batch_tokens=90, mesh=mesh)

    for of_rank in run_ranks(layout, work):
        check(of_rank, expected)


def test_what_cannot_be_scored_is_refused():
    model = build(TINY_LLAMA, single_rank_mesh(), packs=True)
    for request, word in (
        (([], [1]), "no context"),
        (([1], [VOCAB]), "tokenizer"),
        (([1], [1] * (LENGTH + 1)), "shorten"),
    ):
        with pytest.raises(ValueError, match=word):
            score(model, [request], max_length=LENGTH)
    assert score(model, [([1], [])], max_length=LENGTH) == [(0.0, True)]
    assert score(model, [], max_length=LENGTH) == []


def test_choices_share_their_context_and_nothing_is_padded():
    requests = [([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([7], [8, 9]), ([1, 2, 3], [])]
    rows = rows_of(requests, 10, shares=True)
    assert [(row.context, row.requests, row.length) for row in rows] == [((1, 2, 3), [0, 1], 4), ((7,), [2], 2)]
    assert [row.length for row in rows_of(requests, 10, shares=False)] == [4, 3, 2]
    assert rows_of([([1, 2, 3], [4, 5])], 3, shares=True)[0].context == (2, 3)
    many = rows_of([([1] * n, [2]) for n in range(1, 60)], 100, shares=True)
    batches = packed_batches(many, 64)
    assert sorted(row.length for batch in batches for row in batch) == list(range(1, 60))
    assert all(sum(row.length for row in batch) <= 64 for batch in batches) and len(batches) <= 30
    for batch in padded_batches(many, 400, [20]):
        assert batch[0].length * len(batch) <= 400 and batch[-1].length >= 0.9 * batch[0].length
        assert len({row.length > 20 for row in batch}) == 1
    assert sorted(index for own in deal(batches, 3) for index in own) == list(range(len(batches)))


def test_kernels_agree_on_continuations_of_one_beginning():
    """Oracle: each continuation computed behind a copy of its beginning, causally."""
    torch.manual_seed(0)
    numbers = torch.tensor([[0] * 7 + [1] * 4])
    branches = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 0, 0, 0, 0]])
    mask = PrefixTrees(numbers, branches)
    q, k, v = torch.randn(3, 1, 2, 11, 4, dtype=torch.float64)
    want = torch.zeros_like(q)
    for columns in ([0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 6], [7, 8, 9, 10]):
        want[:, :, columns] = KERNELS["fused"].compute(*(x[:, :, columns] for x in (q, k, v)), None, None)
    got = KERNELS["fused"].compute(q, k, v, mask, None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    # some of the queries alone: of one document several, of the other its last
    asked = torch.tensor([2, 4, 5, 10])
    of_asked = QueriesOfTrees(mask, asked)
    for kernel in ("fused", "unfused"):
        got = KERNELS[kernel].compute(q[:, :, asked], k, v, of_asked, lambda probabilities: probabilities)
        torch.testing.assert_close(got, want[:, :, asked], rtol=0, atol=1e-14)
    assert mask.mask[0, 0, 5].tolist() == [False, False, False, True, True, False, True, True, True, True, True]
