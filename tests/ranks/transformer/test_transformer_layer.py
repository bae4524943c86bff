"""One transformer layer and one block: Megatron's contract, the classic names, and who is asked for what."""

from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from local_ranks import run_ranks
from tiny_bert import CONFIGS as BERTS
from tiny_run import GPT, GPT2, SEQ, Layout, assert_equal, run
from tiny_t5 import PLAIN as T5
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel import global_state
from megatron.core.parallel.stage_to_rank import loop
from megatron.core.sharding.placement import Constant
from megatron.core.transformer import module, transformer_layer
from megatron.core.transformer.activation_norm_placement_multiplier_config import NORM_PLACEMENTS
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.numbered_layers import NumberedLayers
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.spec_utils import ContextSpec, ModuleSpec
from megatron.core.transformer.torch_norm import FusedLayerNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    ParallelTransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    submodules_of,
)
from megatron.training.result_checks.nan_locator import _NanLocator

H, S, M, B = 8, 5, 7, 2
CONFIG = ModelConfig(num_layers=3, hidden_size=H, num_attention_heads=2, fp64=True, init_method_std=0.3)
X, MEMORY = (torch.randn(n, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (S, M))


def place() -> LayerContext:
    return LayerContext.from_mesh(single_rank_mesh(), torch.float64, SampleDropoutKeys(1))


def with_values(part: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in part.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 3
    return part


# ---------------------------------------------------------------- the layer


def test_the_submodules_are_those_of_megatron_and_two_of_ours():
    names = [
        "input_layernorm",
        "self_attention",
        "self_attn_bda",
        "pre_cross_attn_layernorm",
        "cross_attention",
        "cross_attn_bda",
        "pre_mlp_layernorm",
        "mlp",
        "mlp_bda",
        "sharded_state_dict_keys_map",
    ]
    ours = [field.name for field in fields(TransformerLayerSubmodules) if field.kw_only]
    assert [field.name for field in fields(TransformerLayerSubmodules)] == names + ours
    assert ours == ["post_self_attn_layernorm", "post_mlp_layernorm"]
    plain = TransformerLayerSubmodules()
    assert {getattr(plain, name) for name in names[:-1]} == {IdentityOp, IdentityFuncOp}


@pytest.mark.parametrize("placement", NORM_PLACEMENTS)
def test_the_layer_returns_its_context_and_the_classic_one_its_tensor(placement: str):
    """From 1 and from 0 over the model; dropout's masks follow from the number."""
    config = replace(CONFIG, norm_placement=placement, hidden_dropout=0.2)
    layer = with_values(TransformerLayer(config, layer_number=2, layer_context=place()))
    classic = with_values(ParallelTransformerLayer(config, 1, place()))
    expected = [name for name, _ in classic.named_parameters()]
    assert [name for name, _ in layer.named_parameters()] == expected
    first_norm = "post_self_attn_layernorm" if placement in ("post", "branch") else "input_layernorm"
    assert next(name for name in expected if "layernorm" in name) == f"{first_norm}.weight"
    hidden_states, context = layer(X, None, MEMORY)
    assert context is MEMORY and torch.equal(hidden_states, classic(X))
    assert not torch.equal(hidden_states, with_values(ParallelTransformerLayer(config, 2, place()))(X))


def test_a_spec_may_have_norms_behind_its_blocks():
    """The layer of `--norm-placement sandwich`, of Megatron's parts; the context of a run's config is left as it is."""

    def work(mesh):
        config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=torch.float64)
        config.hidden_dropout = config.attention_dropout = 0.0
        parts = get_gpt_layer_local_spec().submodules
        parts.post_self_attn_layernorm = parts.post_mlp_layernorm = FusedLayerNorm
        layer = with_values(TransformerLayer(config, parts))
        own = replace(module.settings_of(config), norm_placement="sandwich")
        ours = with_values(ParallelTransformerLayer(own, 0, place()))
        assert [name for name, _ in layer.named_parameters()] == [name for name, _ in ours.named_parameters()]
        torch.testing.assert_close(layer(X)[0], ours(X), rtol=1e-12, atol=1e-12)

    run_ranks({}, work)


def test_cross_attention_has_no_place_in_parallel_residuals():
    config = replace(CONFIG, norm_placement="parallel")
    with pytest.raises(
        ValueError, match=r"--norm-placement parallel has no place .*'pre', 'branch', 'sandwich', 'post'"
    ):
        TransformerLayer(config, submodules_of(config, cross_attention=True), layer_context=place())


def test_a_part_may_be_built_as_ours_are():
    """From (config, layer, context), in the place of one of Megatron's."""

    class Half(nn.Module):
        def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
            super().__init__()
            self.built_from = config, layer, context

        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    parts, context = submodules_of(CONFIG), place()
    parts.mlp = ContextSpec(Half)
    layer = TransformerLayer(CONFIG, parts, 3, layer_context=context)
    assert layer.mlp.built_from == (CONFIG, 2, context)
    by_keyword = ParallelTransformerLayer(CONFIG, 2, context, make_mlp=Half)
    with_values(layer), with_values(by_keyword)
    assert torch.equal(layer(X)[0], by_keyword(X))

    class Own(Half):
        def forward(self, x: Tensor, mask, angles, cache) -> Tensor:
            return x / 2 + (0 if mask is None else 1)

    own = ParallelTransformerLayer(CONFIG, 2, context, make_attention=Own, make_mlp=Half)
    assert own.self_attention.built_from == (CONFIG, 2, context)
    assert (own(X, torch.ones(1)) - own(X)).abs().max() > 0.1


def test_a_part_of_megatrons_gets_the_context_if_it_names_it():
    class Numbered(nn.Module):
        def __init__(self, config, layer_number, layer_context):
            super().__init__()
            self.built_from = layer_number, layer_context

        def forward(self, hidden_states):
            return hidden_states, None

    context = place()
    layer = TransformerLayer(CONFIG, replace(submodules_of(CONFIG), mlp=Numbered), 2, layer_context=context)
    assert layer.mlp.built_from == (2, context) and layer(X)[0].shape == X.shape


def test_a_compiled_residual_is_for_our_dropout_alone(monkeypatch):
    """A script's bias_dropout_add runs as it is."""
    calls = []

    def own(training: bool, fused: bool):
        return lambda out, residual, probability: calls.append((training, probability)) or residual + out[0]

    def attention(config, layer, context):
        core = ParallelAttention(config, layer, context)
        core.forward = lambda *inputs, forward=core.forward: (forward(*inputs), None)
        return core

    config = replace(CONFIG, hidden_dropout=0.5)
    parts = replace(submodules_of(config), self_attention=ContextSpec(attention), self_attn_bda=own)
    layer = with_values(TransformerLayer(config, parts, layer_context=place()))
    layer.compiled = True
    compiled = []
    region = SimpleNamespace(compiled=lambda residual, out, *_: compiled.append(1) or residual + out)
    monkeypatch.setattr(transformer_layer, "REGIONS", {"residual": region})
    layer(X)
    assert calls == [(True, 0.5)] and compiled == [1]


class Refused(Exception):
    pass


def refuse(*_, **__):
    raise Refused


@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "specs"])
def test_who_is_given_a_context_asks_no_process(name: str, monkeypatch):
    """No model of ours looks up the mesh, the run or the seed of its process: each lookup is an error here."""
    context = place()
    for owner in (module, transformer_layer, global_state):
        monkeypatch.setattr(owner, "get_global_state", refuse)
    ids = torch.arange(6)[None]
    sizes = {"vocab_size": 16, "positions": 8, "context": context}
    if name == "gpt":
        assert GPTModel(GPT2, layers=range(2), **sizes)(ids, ids).shape[:2] == (1, 6)
    elif name == "bert":
        assert BertModel(next(iter(BERTS.values())), layers=range(2), **sizes)(ids, torch.ones_like(ids), 0 * ids)[
            0
        ].shape[:2] == (1, 6)
    elif name == "t5":
        model = T5Model(T5, layers=range(8), decoder_seq_length=4, **sizes)
        assert model(ids, ids[:, :4], torch.ones_like(ids)).shape[:2] == (1, 4)
    else:
        block = TransformerBlock(CONFIG, layers=range(2), layer_context=context)
        assert with_values(block)(X, None).shape == X.shape
        with pytest.raises(Refused):
            TransformerLayer(CONFIG)


# ---------------------------------------------------------------- the block


def test_layers_are_named_by_number_and_indexed_by_place():
    layers = NumberedLayers({number: nn.Linear(number, 1) for number in (4, 5, 6)})
    widths = lambda some: [layer.in_features for layer in some]  # noqa: E731
    assert [name for name, _ in layers.named_parameters()][::2] == ["4.weight", "5.weight", "6.weight"]
    assert widths(layers) == widths(layers.values()) == [4, 5, 6] and len(layers) == 3
    assert (layers[0].in_features, layers[-1].in_features, layers["5"].in_features) == (4, 6, 5)
    assert list(layers.keys()) == [name for name, _ in layers.items()] == ["4", "5", "6"]
    assert list(layers[1:].keys()) == ["5", "6"] and widths(layers[1:]) == [5, 6]
    layers[1] = nn.Linear(9, 1)
    layers["6"] = nn.Linear(2, 1)
    assert widths(layers) == [4, 9, 2] and list(layers.keys()) == ["4", "5", "6"]
    layers.append(nn.Linear(7, 1)).extend([nn.Linear(8, 1)])
    del layers[0], layers["6"]
    assert widths(layers) == [9, 7, 8] and list(layers.keys()) == ["5", "7", "8"]
    assert layers.pop(-1).in_features == 8 and widths(NumberedLayers({}).append(nn.Linear(3, 1))) == [3]
    with pytest.raises(NotImplementedError, match="named by their numbers"):
        layers.insert(0, nn.Linear(1, 1))
    with pytest.raises(IndexError):
        layers[3]
    with pytest.raises(KeyError):
        layers["3"]


def test_the_layers_of_a_block_are_megatrons():
    block = TransformerBlock(CONFIG, layers=range(4, 7), layer_context=place())
    assert [layer.layer_number for layer in block.layers] == [5, 6, 7] and block.num_layers_per_pipeline_rank == 3
    assert isinstance(block.layers[0](X), tuple) and block._get_layer(1) is block.layers[1]
    classic = ParallelTransformer(CONFIG, range(4, 7), place())
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in classic.named_parameters()]
    with_values(block), with_values(classic)
    assert torch.equal(block(X, None), classic(X)) and isinstance(classic.layers[0](X), Tensor)


class Counting(nn.Module):
    """A script's layer that changes the context, which the next layer is given."""

    def __init__(self, config, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, hidden_states, attention_mask, context=None, context_mask=None):
        return hidden_states * self.weight + context.mean(), context * self.layer_number


@pytest.mark.parametrize(
    "recompute",
    [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}],
    ids=str,
)
def test_a_layer_hands_its_context_to_the_next(recompute: dict):
    """In the stage's own numbers, as in Megatron; the gradient of what is recomputed reaches the first context."""
    config = replace(CONFIG, norm_placement="post", **recompute)  # no final norm
    block = TransformerBlock(config, ModuleSpec(Counting), layers=range(6, 9), layer_context=place())
    x, memory = X.clone().requires_grad_(), MEMORY.clone().requires_grad_()
    block(x, None, memory).sum().backward()
    factors = [1, 1 * 1, 1 * 1 * 2]  # what the contexts of the three layers are multiplied by
    expected = X.numel() / MEMORY.numel() * sum(f * 1.5 ** (2 - i) for i, f in enumerate(factors))
    torch.testing.assert_close(memory.grad, torch.full_like(MEMORY, expected), rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, torch.full_like(X, 1.5**3), rtol=1e-12, atol=0)
    assert block.layers[0].weight.grad is not None and block.layers[0].gives_hidden_states


def test_a_decoder_of_classic_layers_takes_the_other_sequence_for_a_mask():
    seen = []

    class Classic(nn.Module):
        def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, mask, angles=None) -> Tensor:
            seen.append((self.layer, mask.memory is MEMORY, mask.self_attention_mask, mask.cache))
            return x

    block = TransformerBlock(CONFIG, layers=range(2), layer_context=place(), numbered_from=3, make_layer=Classic)
    block(X, None, MEMORY, torch.zeros(B, 1, 1, M, dtype=torch.bool))
    assert seen == [(3, True, None, None), (4, True, None, None)]


def test_a_scripts_own_layer_refuses_a_cache():
    block = TransformerBlock(CONFIG, ModuleSpec(Counting), layers=range(2), layer_context=place())
    with (
        pytest.raises(NotImplementedError, match="takes no key/value cache, so it cannot generate text"),
        torch.no_grad(),
    ):
        block(X, None, MEMORY, inference_context=place().cache([0] * B, 8, "cpu"))


def test_a_script_may_name_the_stage_of_its_rank():
    """Four stages on two ranks, with two layers each."""

    def work(mesh) -> list[list[int]]:
        config = TransformerConfig(num_layers=8, hidden_size=H, num_attention_heads=2)
        numbers = []
        for vp_stage in (0, 1):
            block = TransformerBlock(config, get_gpt_layer_local_spec(), vp_stage=vp_stage)
            alone = TransformerLayer(config, None, 2, vp_stage=vp_stage)
            numbers.append([layer.layer_number for layer in block.layers])
            assert alone.layer_number == numbers[-1][1]
            assert next(iter(block.layers.keys())) == str(numbers[-1][0] - 1)
        return numbers

    assert run_ranks({"pp": 2}, work, stages=loop(2, 2)) == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


def test_a_list_of_specs_is_of_the_stages_layers():
    class Other(TransformerLayer):
        pass

    specs = [ModuleSpec(TransformerLayer), ModuleSpec(Other, submodules=submodules_of(CONFIG))]
    block = TransformerBlock(CONFIG, TransformerBlockSubmodules(specs), layers=range(4, 6), layer_context=place())
    assert [type(layer) for layer in block.layers] == [TransformerLayer, Other]
    assert [layer.layer_number for layer in block.layers] == [5, 6]  # given a context, a layer counts over the model


# ---------------------------------------------------------------- what reads a layer's output


def test_what_a_layer_was_given_is_not_its_output():
    """A context that is not finite is told of the encoder, not of each layer that returns it."""
    locator = _NanLocator(None)
    found = []
    locator._check_in_microbatch = lambda what, x: found.append((what, x))
    layer = TransformerLayer(CONFIG, layer_context=place())
    check = partial(locator._check_output, "layers.0")
    layer.register_forward_hook(check, with_kwargs=True)
    hidden_states, _ = layer(X, context=MEMORY)
    assert [(what, x is hidden_states) for what, x in found] == [("the output of layers.0", True)]


# ---------------------------------------------------------------- in training


class Gained(nn.Module):
    """An MLP of a script's own: the usual one, times a gain for each feature."""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.mlp = ParallelMLP(config, layer, context)
        self.gain = context.tp.replicated((config.hidden_size,), Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.gain


def by_spec(config: ModelConfig, **parts) -> GPTModel:
    own = submodules_of(config)
    own.mlp = ContextSpec(Gained)
    return GPTModel(config, positions=SEQ, spec=ModuleSpec(TransformerLayer, submodules=own), **parts)


def by_make_layer(config: ModelConfig, **parts) -> GPTModel:
    return GPTModel(config, positions=SEQ, make_layer=partial(ParallelTransformerLayer, make_mlp=Gained), **parts)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, sp=True, m=2, recompute="all parts"),
        Layout(dp=2, pp=2, m=2, schedule="zb-h1", data_parallel=DataParallelConfig(zero_stage=3)),
        pytest.param(Layout(cp=2, dp=2, m=1, recompute="uniform 1"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_model_with_a_part_in_its_spec_trains_as_in_one_process(layout: Layout):
    """And as the same part does by the classic name."""
    config = replace(GPT2, norm_placement="sandwich")
    expected = run(config, Layout(), subject=replace(GPT, make=by_make_layer))
    assert_equal(run(config, layout, subject=replace(GPT, make=by_spec)), expected, 1e-10)


class Routed(nn.Module):
    """An MLP whose router reads the norm's output for a loss of its own, which is another root of the backward."""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.mlp = ParallelMLP(config, layer, context)
        self.router = nn.Linear(config.hidden_size, 3, dtype=torch.float64)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.router(x).softmax(-1).square().sum()
        return self.mlp(x)


def test_a_recomputed_norm_is_there_for_a_second_loss_of_its_block():
    """The memory of norm(x) is filled again before the block's backward, and the other loss's reads it too."""

    def grads(config: ModelConfig) -> dict[str, Tensor]:
        parts = submodules_of(config)
        parts.mlp = ContextSpec(Routed)
        spec = ModuleSpec(TransformerLayer, submodules=parts)
        block = with_values(TransformerBlock(config, spec, layers=range(3), layer_context=place()))
        out = block(X, None)
        torch.autograd.backward([*(layer.mlp.loss for layer in block.layers), out.square().sum()])
        return {name: p.grad for name, p in block.named_parameters()}

    expected = grads(CONFIG)
    got = grads(replace(CONFIG, recompute_granularity="selective", recompute_modules=["layernorm"]))
    assert all(torch.equal(got[name], grad) for name, grad in expected.items())


def test_a_layer_with_a_part_of_a_scripts_own_takes_a_cache():
    """If its attention is ours: the logits of the last token are those of the whole text."""
    context = place()
    model = by_spec(GPT2, vocab_size=16, layers=range(2), context=context)
    with_values(model).eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        expected = model(ids, ids)[:, -1:]  # [b, 1, v]
        cache = context.cache([0], SEQ, "cpu")
        model(ids[:, :4], ids[:, :4], cache=cache)
        torch.testing.assert_close(model(ids[:, 4:], ids[:, 4:], cache=cache), expected, rtol=1e-12, atol=1e-12)
