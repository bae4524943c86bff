"""A cache of a script's own: the paged one of examples/ has the bits of the contiguous one, and a layer may cache other entries than keys and values."""

import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch
from cached_scores import AFTER, MODELS, PROMPTS, forced
from documents import names_of_block
from local_ranks import run_ranks
from same_code import ROOT
from tiny_run import GPT, LLAMA, SEQ, VOCAB, Layout, assert_equal, build, build_chunks, run
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.attention.document_and_window_masks import Documents, MaskWithBias, Window, of_last_keys
from megatron.core.ops.attention.kv_cache import CACHES, AttentionCache, Entries, KeyValueCache, LayerAttention
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


def example():
    spec = importlib.util.spec_from_file_location("paged_cache", ROOT / "examples" / "paged_cache" / "paged_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    CACHES["paged"] = module.PagedCache
    return module


@pytest.fixture(autouse=True)
def tables_as_before():
    before = dict(CACHES)
    yield
    CACHES.data = before


@pytest.mark.parametrize(
    ("model", "sizes", "kind"),
    [
        ("llama", {"tp": 2, "pp": 2}, "p2p"),
        ("windows", {"pp": 2, "cp": 2}, "p2p"),
        pytest.param("gpt2", {}, "p2p", marks=pytest.mark.full),
        pytest.param("two groups", {"tp": 2, "cp": 2}, "all_gather", marks=pytest.mark.full),
        pytest.param("gemma3", {"cp": 2}, "a2a", marks=pytest.mark.full),
        pytest.param("oss", {"tp": 4}, "p2p", marks=pytest.mark.full),
    ],
)
def test_a_paged_cache_gives_the_bits_of_the_contiguous_one(model, sizes, kind, monkeypatch):
    """Of texts of different lengths, in blocks of 2 tokens, also past the window, where the cache begins again."""
    paged = example()
    monkeypatch.setattr(paged, "BLOCK", 2)
    config = MODELS[model]
    for length in (SEQ, 6):
        scores = [
            run_ranks(
                sizes,
                partial(forced, config=config, length=length, kind=kind, cache=cache),
                ranks_per_kv_head=config.ranks_per_kv_head(sizes.get("tp", 1)),
            )
            for cache in ("contiguous", "paged")
        ]
        compared = 0
        for contiguous, own in zip(*scores, strict=True):
            for text, other in zip(contiguous, own, strict=True):
                for a, b in zip(text, other, strict=True):
                    assert torch.equal(a, b)
                    compared += 1
        assert compared


@pytest.mark.parametrize(
    ("text", "name", "model", "sizes"),
    [
        ("class ListCache", "list", "llama", {"tp": 2, "pp": 2}),
        ("class WindowCache", "window", "windows", {"cp": 2}),
        pytest.param("class WindowCache", "window", "windows", {"tp": 2, "pp": 2}, marks=pytest.mark.full),
        pytest.param("class ListCache", "list", "windows", {"cp": 2}, marks=pytest.mark.full),
        pytest.param("class WindowCache", "window", "gemma3", {}, marks=pytest.mark.full),
    ],
)
def test_a_cache_of_the_page_gives_the_bits_of_the_contiguous_one(text, name, model, sizes):
    """docs/adding_a_model.md; also past the window of the whole text, where the cache begins again."""
    names_of_block("adding_a_model.md", text)
    config = MODELS[model]
    for length in (SEQ, 6):
        for own, expected in zip(
            *(
                run_ranks(sizes, partial(forced, config=config, length=length, cache=cache))
                for cache in (name, "contiguous")
            ),
            strict=True,
        ):
            assert all(
                torch.equal(a, b) for text, other in zip(own, expected) for a, b in zip(text, other, strict=True)
            )


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("windows", {}),
        pytest.param("gemma3", {"cp": 2}, marks=pytest.mark.full),
        pytest.param("llama", {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_window_cache_need_not_compute_over_columns_that_are_gone(model, sizes):
    """Of texts of different lengths: the mask of padding is cut as the columns are."""
    columns: list[tuple[int, int]] = []  # computed, of the text

    class Last(names_of_block("adding_a_model.md", "class WindowCache")["WindowCache"]):
        def attend(self, layer, q, entries, attention):
            self.append(layer, entries)
            last = self.kept[layer]
            if attention.window_left is not None:
                self.kept[layer] = tuple(x[max(0, len(x) - attention.window_left) :] for x in last)
            columns.append((len(last[0]), self.length + len(q)))
            return attention.over_last_columns(len(last[0])).compute(q, *last)

    CACHES["last"] = Last
    config = MODELS[model]
    for own, expected in zip(
        *(run_ranks(sizes, partial(forced, config=config, length=SEQ, cache=cache)) for cache in ("last", "contiguous"))
    ):
        assert_close_scores([own], expected)
    has_windows = any(config.window_left(layer) is not None for layer in range(config.num_layers))
    assert any(computed < of_text for computed, of_text in columns) == has_windows


def test_a_mask_of_the_last_keys_is_cut_in_all_its_parts():
    hidden, bias = torch.arange(12).view(1, 1, 2, 6) > 7, torch.arange(24.0).view(2, 2, 6)
    cut = of_last_keys(Window(1, hidden), 4)
    assert cut.left == 1 and torch.equal(cut.within, hidden[..., 2:])
    cut = of_last_keys(MaskWithBias(bias, None), 4)
    assert cut.within is None and torch.equal(cut.bias, bias[..., 2:])
    with pytest.raises(TypeError, match="a mask of Documents has as many queries as keys"):
        of_last_keys(Documents(torch.zeros(1, 4)), 2)


def test_a_window_cache_keeps_what_the_window_sees():
    cache = names_of_block("adding_a_model.md", "class WindowCache")["WindowCache"]([0], 8)

    class Sum(LayerAttention):
        window_left = 2

        def compute(self, q: Tensor, *entries: Tensor) -> Tensor:
            return entries[0].flatten()

    for new, expected in ((5, [1, 1, 1, 1, 1]), (1, [0, 0, 0, 1, 1, 1]), (1, [0, 0, 0, 0, 1, 1, 1])):
        assert cache.attend(3, torch.ones(new, 1, 1, 1), (torch.ones(new, 1),), Sum()).tolist() == expected
        cache.advance(new)
        assert len(cache.kept[3][0]) == 2


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2},
        {"cp": 2},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"tp": 4}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_attention_of_the_page_writes_from_latents_what_its_plain_forward_says(sizes):
    """docs/adding_a_model.md: each rank of tp keeps the whole latent. Oracle: one process, each text alone, without a cache."""
    names = names_of_block("adding_a_model.md", "class LatentAttention")
    make_layer = partial(ParallelTransformerLayer, make_attention=names["LatentAttention"])
    subject = replace(GPT, make=lambda config, **parts: GPTModel(config, positions=SEQ, make_layer=make_layer, **parts))
    config = MODELS["gpt2"]
    expected = scores_without_cache(config, subject)
    kept: list[Tensor] = []

    class Watched(Latents):
        def append(self, layer: int, entries: Entries) -> None:
            kept.extend(entries)
            super().append(layer, entries)

    CACHES["latents"] = Watched
    ranks = run_ranks(sizes, partial(forced, config=config, length=SEQ, cache="latents", subject=subject))
    assert {latents.shape[2:] for latents in kept} == {(8,)}
    before_the_last_stage = 2 if sizes.get("pp") else 0
    assert_close_scores(ranks[before_the_last_stage:], expected)


def scores_without_cache(config, subject) -> list[list[Tensor]]:
    """The scores of each text at each step, of one process that computes each text alone."""
    model = build_chunks(single_rank_mesh(), config, Layout(), subject=subject)[0][0].module.eval()
    expected = []
    with torch.no_grad():
        for prompt, after in zip(PROMPTS, AFTER):
            texts = (prompt + after[:step] for step in range(len(after)))
            expected.append([model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1, :VOCAB] for ids in texts])
    return expected


def assert_close_scores(ranks, expected) -> None:
    for seen in ranks:
        for got, want in zip(seen, expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() <= 1e-10 * b.abs().max()


def linear_attention():
    """Of docs/adding_a_model.md, as a subject of layouts; its block adds the cache "sums"."""
    attention = names_of_block("adding_a_model.md", "class LinearAttention")["LinearAttention"]
    make_layer = partial(ParallelTransformerLayer, make_attention=attention)
    return replace(GPT, make=lambda config, **parts: GPTModel(config, positions=SEQ, make_layer=make_layer, **parts))


@pytest.mark.parametrize(
    ("sizes", "cache"),
    [
        ({"tp": 2}, "sums"),
        ({"cp": 2}, "sums"),
        pytest.param({"cp": 2}, "contiguous", marks=pytest.mark.full),
        pytest.param({"pp": 2, "cp": 2}, "sums", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_linear_attention_of_the_page_writes_from_sums_what_its_plain_forward_says(sizes, cache):
    """docs/adding_a_model.md: a cache that keeps one matrix a head, of texts of different lengths."""
    subject, config = linear_attention(), MODELS["gpt2"]
    ranks = run_ranks(sizes, partial(forced, config=config, length=SEQ, cache=cache, subject=subject))
    before_the_last_stage = 2 if sizes.get("pp") else 0
    assert_close_scores(ranks[before_the_last_stage:], scores_without_cache(config, subject))


def test_the_linear_attention_of_the_page_trains_over_context_parallel_ranks_as_in_one_process():
    trained = partial(run, replace(MODELS["gpt2"], num_layers=2), subject=linear_attention(), steps=1, global_batch=4)
    assert_equal(trained(Layout(tp=2, sp=True, cp=2, m=2)), trained(Layout(m=2)), 1e-10)


def test_what_sees_its_own_tokens_alone_is_refused_where_ranks_share_the_samples():
    """An attention that asks no other rank, and a cache that cannot take the prompts of all."""
    names = names_of_block("adding_a_model.md", "class LinearAttention")
    config = MODELS["gpt2"]

    class Alone(names["LinearAttention"]):
        attends_over_whole_samples = False

    class OfAttend(AttentionCache):
        def attend(self, layer, q, entries, attention):
            return q.flatten(2)

    CACHES["of attend"] = OfAttend

    def work(mesh) -> None:
        context = LayerContext.from_mesh(mesh, torch.float64)
        with pytest.raises(ConfigError, match=r"the attention of layer 1 \(Alone\) has no CoreAttention"):
            ParallelTransformerLayer(config, 1, context, make_attention=Alone)
        with pytest.raises(ConfigError, match=r"'of attend' \(OfAttend\) defines no append"):
            context.cache([0], 4, "cpu", "of attend")

    run_ranks({"cp": 2}, work)

    class OwnLayer(nn.Module):
        """Built without `TransformerLayer`: by `make_layer`, or as Megatron's spec."""

        def __init__(self, config, layer=None, context=None, *, layer_number=None):
            super().__init__()

        def forward(self, x, mask=None, angles=None, cache=None):
            return x.cumsum(0)

    class Told(OwnLayer):
        attends_over_whole_samples = True

    def build(mesh) -> None:
        context = LayerContext.from_mesh(mesh, torch.float64)
        of_stage = {"layers": [1], "layer_context": context, "settings": config}
        for ways in ({"make_layer": OwnLayer}, {"spec": ModuleSpec(OwnLayer)}):
            with pytest.raises(ConfigError, match=r"2, and layer 1 \(OwnLayer\) has no CoreAttention.* by itself"):
                TransformerBlock(config, **of_stage, **ways)
        for layer in (Told, IdentityOp):
            TransformerBlock(config, ModuleSpec(layer), **of_stage)

    run_ranks({"cp": 2}, build)
    alone = LayerContext.from_mesh(single_rank_mesh(), torch.float64)
    ParallelTransformerLayer(config, 1, alone, make_attention=Alone)
    assert isinstance(alone.cache([0], 4, "cpu", "of attend"), OfAttend)


@pytest.mark.full
def test_the_attention_of_the_page_trains_in_a_layout_as_in_one_process():
    names = names_of_block("adding_a_model.md", "class LatentAttention")
    make_layer = partial(ParallelTransformerLayer, make_attention=names["LatentAttention"])
    subject = replace(GPT, make=lambda config, **parts: GPTModel(config, positions=SEQ, make_layer=make_layer, **parts))
    trained = partial(run, MODELS["gpt2"], subject=subject, steps=2, global_batch=12)
    assert_equal(trained(Layout(tp=2, sp=True, pp=2, m=3)), trained(Layout()), 1e-10)


def test_a_text_takes_blocks_as_it_grows():
    paged = example()
    cache = paged.PagedCache([0, 30], capacity=64)
    cache.append(0, (torch.ones(32, 2, 3), torch.ones(32, 2, 3)))
    assert [len(own) for own in cache.blocks] == [2, 1] and cache.used == 3
    cache.advance(32)
    cache.append(0, (torch.full((1, 2, 3), 2.0), torch.ones(1, 2, 3)))
    assert [len(own) for own in cache.blocks] == [3, 1]
    keys, _ = cache.entries(0, 33)
    assert keys[:32, 0].eq(1).all() and keys[32].eq(2).all() and keys[:30, 1].eq(0).all()


class Latents(AttentionCache):
    """One tensor for each layer, [columns, b, width], as a latent attention keeps."""

    def __init__(self, starts, capacity, device="cpu"):
        super().__init__(starts, capacity, device)
        self.kept: dict[int, Tensor] = {}

    def append(self, layer: int, entries: Entries) -> None:
        (new,) = entries
        self.kept[layer] = torch.cat((self.kept[layer], new)) if layer in self.kept else new

    def entries(self, layer: int, stop: int) -> Entries:
        return (self.kept[layer][:stop],)


class FromLatents:
    """Keys and values out of a latent, at the attention."""

    def __init__(self, attention: LayerAttention, unpack):
        self.attention, self.unpack, self.mask, self.window_left = attention, unpack, None, None

    def over_whole_sequence(self) -> "FromLatents":
        return FromLatents(self.attention.over_whole_sequence(), self.unpack)

    def compute(self, q: Tensor, latent: Tensor) -> Tensor:
        return self.attention.compute(q, *self.unpack(latent))


class OnLatents:
    """What a layer of such an attention does, with keys and values side by side as its latent."""

    def __init__(self, inner: AttentionCache):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def attend(self, layer: int, q: Tensor, entries: Entries, attention: LayerAttention) -> Tensor:
        k, v = entries
        latent = torch.cat((k.flatten(2), v.flatten(2)), dim=-1)
        unpack = lambda x: tuple(part.unflatten(-1, k.shape[2:]) for part in x.chunk(2, dim=-1))  # noqa: E731
        return self.inner.attend(layer, q, (latent,), FromLatents(attention, unpack))


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}], ids=str)
def test_entries_may_be_other_than_keys_and_values(sizes, monkeypatch):
    config = MODELS["llama"]
    expected = run_ranks(sizes, partial(forced, config=config, length=SEQ))
    CACHES["latents"] = Latents
    attend = ParallelAttention.attend
    monkeypatch.setattr(
        ParallelAttention,
        "attend",
        lambda self, heads, mask=None, cache=None: attend(self, heads, mask, cache and OnLatents(cache)),
    )
    for own, wanted in zip(run_ranks(sizes, partial(forced, config=config, length=SEQ, cache="latents")), expected):
        assert all(torch.equal(a, b) for text, other in zip(own, wanted) for a, b in zip(text, other))


def test_a_subclass_cannot_take_a_name_of_the_base():
    """Whose columns would otherwise be counted in it."""

    class Counted(Latents):
        def __init__(self, starts, capacity, device="cpu"):
            super().__init__(starts, capacity, device)
            self.length = {}  # layer -> columns

    with pytest.raises(AttributeError, match=r"Counted\.length is AttentionCache's own; choose another name"):
        Counted([0], 4)
    for name in ("capacity", "starts", "mask", "positions", "append", "shares"):
        with pytest.raises(AttributeError, match=rf"Latents\.{name} is"):
            setattr(Latents([0], 4), name, None)
    cache = Latents([0, 2], 4)
    cache.advance(3)
    assert (cache.length, cache.capacity, cache.starts.tolist(), cache.is_padded) == (3, 4, [0, 2], True)


def test_a_cache_that_is_not_there_is_refused_with_those_that_are():
    model = build(single_rank_mesh(), LLAMA, sp=False)[0].module
    options = {"max_new_tokens": 1, "max_length": SEQ, "stop_id": None, "choose": [lambda x: 0]}
    with pytest.raises(ValueError, match="no cache 'pagd'; CACHES has contiguous"):
        generate_batch(model, [[1]], cache="pagd", **options)
    with pytest.raises(TypeError, match="starts, capacity, device"):
        CACHES["bad"] = lambda capacity: KeyValueCache([0], capacity)
