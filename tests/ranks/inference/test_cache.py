"""A token at a time with kept keys and values, in any layout, equals the plain forward of one process over the whole text."""

from functools import partial

import pytest
import torch
from cached_scores import AFTER, MODELS, PROMPTS, forced
from local_ranks import run_ranks
from tiny_run import GPT2, SEQ, VOCAB, Layout, build, build_chunks

from megatron.core.inference.generate import generate_batch
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.parallel.mesh import Mesh

LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2)]


def plain_scores(config, length: int) -> list[list[torch.Tensor]]:
    """Of each text and step: the scores from a forward over the text so far, alone, of one process without a cache."""
    model = build(single_rank_mesh(), config, sp=False)[0].module.eval()
    scores = []
    with torch.no_grad():
        for prompt, after in zip(PROMPTS, AFTER):
            texts = [(prompt + after[:step])[-length:] for step in range(len(after))]
            scores.append([model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1, :VOCAB] for ids in texts])
    return scores


def assert_drawn_from_plain_scores(ranks: list, config, length: int, before_the_last_stage: int) -> None:
    expected = plain_scores(config, length)
    for rank, seen in enumerate(ranks):
        if rank < before_the_last_stage:
            assert seen == [[], [], []], "only the last stage draws"
            continue
        for got, want in zip(seen, expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.parametrize("delayed", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_cached_scores_equal_the_plain_forward(model, tp, pp, delayed):
    """Of texts of different lengths in one batch, for each alone; also past the window, where the cache begins again."""
    config = MODELS[model]
    for length in (SEQ, 6):
        work = partial(forced, config=config, length=length)
        ranks = run_ranks({"tp": tp, "pp": pp}, work, delayed=delayed, ranks_per_kv_head=config.ranks_per_kv_head(tp))
        assert_drawn_from_plain_scores(ranks, config, length, tp * (pp - 1))


KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
SHARED = [("llama", 2, "p2p", 1, 2), *(("windows", 2, kind, 2, 1) for kind in KINDS), ("gpt2", 4, "a2a+p2p", 1, 1)]
SHARED += [("oss", 2, "a2a", 1, 2), ("two groups", 4, "all_gather", 2, 1), ("gemma3", 2, "p2p", 1, 1)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "cp", "kind", "tp", "pp"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case is not SHARED[0])) for case in SHARED],
)
def test_prompts_shared_among_ranks_give_the_scores_of_the_plain_forward(model, cp, kind, tp, pp):
    """Context parallelism: each rank computes its part of the prompts, padded to chunks, and has all keys for the next tokens."""
    config, sizes = MODELS[model], {"tp": tp, "pp": pp, "cp": cp, "cp_heads": 2}
    for length in (SEQ, 6):
        work = partial(forced, config=config, length=length, kind=kind)
        ranks = run_ranks(sizes, work, delayed=True, ranks_per_kv_head=config.ranks_per_kv_head(tp))
        assert_drawn_from_plain_scores(ranks, config, length, tp * cp * (pp - 1))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_is_shared_among_four_ranks(kind: str):
    """Seven of eight columns are padding, on three ranks all."""

    def scores(mesh: Mesh) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        model = build_chunks(mesh, MODELS["gpt2"], Layout(cp_types=(kind,)))[0][0].module
        options = {"max_new_tokens": 4, "max_length": SEQ, "stop_id": None, "mesh": mesh}
        list(generate_batch(model, [[5]], **options, choose=[lambda x: seen.append(x) or int(x.argmax())]))
        return torch.stack(seen)

    alone = scores(single_rank_mesh())
    assert len(alone) == 4
    for shared in run_ranks({"cp": 4, "cp_heads": 2}, scores):
        torch.testing.assert_close(shared, alone, rtol=1e-10, atol=1e-10)


def test_without_the_cache_the_scores_are_the_same():
    config = MODELS["llama"]
    kept, computed = (forced(single_rank_mesh(), config, length=SEQ, use_cache=use) for use in (True, False))
    torch.testing.assert_close(kept, computed, rtol=1e-10, atol=1e-10)


def test_a_step_moves_one_token_and_not_the_text():
    """Bytes of the calls, from the algebra: two sums a layer and one of the embedding, over t = 2; one transfer; the scores; the ids."""

    def work(mesh: Mesh) -> list:
        model = build(mesh, GPT2, sp=False)[0].module
        steps = generate_batch(
            model, [[1, 2, 3]], max_new_tokens=2, max_length=SEQ, stop_id=None, choose=[lambda s: 4], mesh=mesh
        )
        next(steps)
        with mesh.ledger.record() as calls:
            next(steps)
        return [(call.op, call.axis, call.bytes) for call in calls]

    h, v = 32 * 8, 64 * 8  # bytes of a token's hidden state, and of its scores with padding to 2 x 8 words
    first, _, last, _ = run_ranks({"tp": 2, "pp": 2}, work)
    assert first == [("all_reduce", "tp", h)] * 5 + [("send", "pp_forward", h // 2), ("broadcast", "mp", 8)]
    assert last == [
        ("recv", "pp_forward", h // 2),
        ("all_gather", "tp", h // 2),
        *[("all_reduce", "tp", h)] * 4,
        ("all_gather", "tp", v // 2),
        ("broadcast", "mp", 8),
    ]


@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 2, "pp": 2}])
def test_what_fails_on_the_last_stage_is_heard_on_every_rank(layout):
    def broken(scores):
        raise ValueError("the weights are broken")

    def work(mesh: Mesh) -> str:
        model = build(mesh, GPT2, sp=False)[0].module
        steps = generate_batch(model, [[1]], max_new_tokens=2, max_length=SEQ, stop_id=None, choose=[broken], mesh=mesh)
        with pytest.raises((ValueError, RuntimeError), match="weights") as caught:
            next(steps)
        return type(caught.value).__name__

    names = run_ranks(layout, work)
    assert names == ["PeerError"] * (len(names) // 2) + ["ValueError"] * (len(names) - len(names) // 2)


def test_a_text_that_has_ended_says_no_more():
    ids = {0: [4, 5, 9], 1: [9, 5, 5]}

    def draw(scores, text):
        return ids[text].pop(0)

    model = build(single_rank_mesh(), GPT2, sp=False)[0].module
    steps = generate_batch(
        model, [[1], [2]], max_new_tokens=3, max_length=SEQ, stop_id=9, choose=[partial(draw, text=i) for i in (0, 1)]
    )
    assert list(steps) == [[4, None], [5, None]]
    assert ids[1] == [5, 5], "nothing is drawn for it"


def test_a_cache_under_sequence_parallelism_is_refused():
    def work(mesh: Mesh) -> None:
        model = build(mesh, GPT2, sp=True)[0].module
        steps = generate_batch(model, [[1, 2]], max_new_tokens=1, max_length=SEQ, stop_id=None, choose=[len], mesh=mesh)
        with pytest.raises(ValueError, match="sequence parallel"):
            next(steps)

    run_ranks({"tp": 2}, work)


def test_positions_and_mask_of_texts_that_begin_in_different_columns():
    cache = KeyValueCache([2, 0], capacity=5)
    assert cache.positions(4).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert (~cache.mask(4)[:, 0]).long().tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]
    cache.advance(4)
    assert cache.positions(1).tolist() == [[2], [4]]
    assert (~cache.mask(1)[:, 0]).long().tolist() == [[[0, 0, 1, 1, 1]], [[1, 1, 1, 1, 1]]]


def test_texts_of_one_length_need_no_mask_but_behind_others():
    cache = KeyValueCache([0], capacity=5)
    assert cache.mask(3) is None
    cache.advance(3)
    assert cache.mask(1) is None
    assert (~cache.mask(2)[0, 0]).long().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
