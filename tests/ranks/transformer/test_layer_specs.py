"""Layer specs of Megatron core: a user's own layers and parts train under TP and PP to the weights of one process."""

from functools import cache

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import my_pieces, put_together
from torch import nn
from torch.nn import functional

from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.global_state import defer_weight_initialization, get_global_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.sharding.initial_values import initialize_parameter
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

SEQ, BATCH, VOCAB = 6, 2, 16


class OwnNorm(nn.Module):
    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, x):
        return functional.normalize(x, dim=-1, eps=self.eps) * self.gain


class OwnAttention(nn.Module):
    """The mean of the tokens so far, through two linear layers that the spec names."""

    def __init__(self, config, submodules, layer_number, attn_mask_type=None):
        super().__init__()
        self.layer_number, h = layer_number, config.hidden_size
        options = {"config": config, "bias": True, "skip_bias_add": True}
        into = {"init_method": config.init_method, "gather_output": False}
        self.into = build_module(submodules["into"], h, 2 * h, **options, **into)
        out = {"init_method": config.output_layer_init_method, "input_is_parallel": True}
        self.out = build_module(submodules["out"], 2 * h, h, **options, **out)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        y, bias = self.into(hidden_states.cumsum(0) / self.layer_number)
        return self.out((y + bias).tanh())


class OwnMLP(nn.Module):
    def __init__(self, config, submodules):
        super().__init__()
        options = {"config": config, "init_method": config.init_method, "skip_bias_add": True}
        h, f = config.hidden_size, config.ffn_hidden_size
        self.fc1 = build_module(submodules.linear_fc1, h, f, gather_output=False, **options)
        self.fc2 = build_module(submodules.linear_fc2, f, h, input_is_parallel=True, **options)

    def forward(self, hidden_states):
        y, bias = self.fc1(hidden_states)
        return self.fc2((y + bias).relu().square())


class OwnLayer(nn.Module):
    """A layer that is no TransformerLayer; its MLP is."""

    def __init__(self, config, submodules, layer_number):
        super().__init__()
        self.mlp, self.layer_number = build_module(submodules.mlp, config=config), layer_number
        self.scale = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_states, attention_mask, **_):
        out, bias = self.mlp(hidden_states * self.scale)
        return hidden_states + out + (0 if bias is None else bias), None


class OwnColumns(ColumnParallelLinear):
    """A column-parallel layer of the user's under attention and MLP of ours."""

    def forward(self, x):
        y, bias = super().forward(x)
        return 2 * y, bias


class OwnCore(nn.Module):
    def __init__(self, config, layer_number, attn_mask_type, attention_type):
        super().__init__()

    def forward(self, query, key, value, attention_mask):
        return (query * key.sigmoid() + value.cumsum(0)).flatten(2)


class Penalised(nn.Module):
    """An MLP that adds the size of its output to the objective."""

    def __init__(self, config, submodules, layer_number, *, layer_context):
        super().__init__()
        self.mlp, self.layer_number, self.context = OwnMLP(config, submodules), layer_number, layer_context

    def forward(self, hidden_states):
        out, bias = self.mlp(hidden_states)
        size = self.context.sum_over_sample(out.square().sum((0, 2))).sqrt()  # [b]
        self.context.aux_losses.add("size", self.layer_number, size, 0.1)
        return out, bias


def spec_of(name: str) -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    parts = spec.submodules
    if name == "a layer":
        spec.module = OwnLayer
    if name in ("parts", "norms"):
        parts.input_layernorm = parts.pre_mlp_layernorm = OwnNorm
    if name == "parts":
        attention = {"into": ColumnParallelLinear, "out": RowParallelLinear}
        parts.self_attention = ModuleSpec(OwnAttention, submodules=attention)
        parts.mlp = ModuleSpec(OwnMLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    if name == "an auxiliary loss":
        parts.mlp = ModuleSpec(Penalised, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    if name == "parts of parts":
        parts.self_attention.submodules.linear_qkv = parts.mlp.submodules.linear_fc1 = OwnColumns
        parts.self_attention.submodules.core_attention = OwnCore
    if name == "the engine's":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        parts.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
        parts.mlp.submodules = MLPSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear)
    if name == "a subclass":
        spec.module = type("Mine", (TransformerLayer,), {})
    return spec


def forward_step(data, model):
    tokens = next(data) if data is not None else None
    out = model(tokens[:, :-1], torch.arange(SEQ).repeat(BATCH, 1), None, labels=tokens[:, 1:])
    return out, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def trained(mesh, name, steps=2, sp=False, layout=None):
    """(losses, parameters) after two steps of gradient descent."""
    pp = mesh["pp"]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        init_method_std=0.3,
        sequence_parallel=sp,
        pipeline_model_parallel_layout=layout,
    )
    get_global_state().seed = 1
    ends = {"pre_process": pp.rank == 0, "post_process": pp.rank == pp.size - 1}
    with defer_weight_initialization():
        model = GPTModel(config, spec_of(name), VOCAB, SEQ, **ends)
    if name == "an auxiliary loss":
        model.aux_losses.declare("size")
    for path, parameter in model.named_parameters():
        if not hasattr(parameter, "placement"):
            parameter.placement = Placement(tuple(parameter.shape), Constant(1.0), replicated_over=("tp",))
        initialize_parameter(parameter, 3, path, mesh)
    losses, draw = [], torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(VOCAB, (2, BATCH, SEQ + 1), generator=draw)
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch),
            model=model,
            num_microbatches=2,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
        losses += [
            sum(x.item() for x in report.values()) for report in reports
        ]  # the auxiliary loss has its mean there
        for parameter in model.parameters():
            parameter.data -= 0.5 * parameter.grad
            parameter.grad = None
    return losses, my_pieces(model, mesh, lambda p: p.data)


@cache
def one_process(name: str):
    ((losses, pieces),) = run_ranks({}, lambda mesh: trained(mesh, name))
    return losses, put_together([pieces])


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["parts", "a layer", "norms", "an auxiliary loss", "parts of parts", "the engine's", "a subclass"]
)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_modules_of_the_user_train_as_in_one_process(name, sizes):
    losses, whole = one_process(name)
    ranks = run_ranks(sizes, lambda mesh: trained(mesh, name))
    assert len(losses) == 4 and ranks[-1][0] == pytest.approx(losses, rel=1e-10)
    found = put_together([pieces for _, pieces in ranks])
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def test_a_spec_of_our_parts_computes_what_our_layer_does():
    """Dropout included."""
    losses, whole = one_process("ours")
    again, parts = one_process("a subclass")
    assert losses == pytest.approx(again, rel=1e-10)
    for name, value in parts.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [None, type("Mine", (TransformerLayer,), {})], ids=["ours", "a subclass"])
def test_a_spec_normalizes_heads_as_the_config_does(layer):
    def work(mesh):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)
        spec = get_gpt_layer_local_spec(None, False, True, False, False, normalization="LayerNorm")
        spec.module = layer or spec.module
        by_spec = GPTModel(config, spec, VOCAB, SEQ)
        config.qk_layernorm = True
        by_config = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ)
        weights = dict(by_spec.named_parameters())
        by_config.load_state_dict(weights)
        assert sum("q_layernorm" in name for name in weights) == 2
        tokens, places = torch.arange(SEQ)[None] % VOCAB, torch.arange(SEQ)[None]
        by_spec.eval(), by_config.eval()
        assert torch.equal(by_spec(tokens, places, None), by_config(tokens, places, None))

    run_ranks({}, work)


@pytest.mark.parametrize("freq", [1, [0, 1]])
def test_a_spec_with_experts_has_them_where_the_config_says_also_in_a_layer_of_the_scripts_own(freq):
    def work(mesh):
        config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)
        config.num_moe_experts, config.moe_layer_freq = 4, freq
        mine, changed = get_gpt_layer_local_spec(num_experts=4), get_gpt_layer_local_spec(num_experts=4)
        changed.module = type("Mine", (TransformerLayer,), {})
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        models = [GPTModel(config, spec, VOCAB, SEQ) for spec in (mine, changed, block, get_gpt_layer_local_spec())]
        names = [name for name, _ in models[0].named_parameters() if "mlp.router.weight" in name]
        assert len(names) == (2 if freq == 1 else 1)
        tokens, places = torch.arange(SEQ)[None] % VOCAB, torch.arange(SEQ)[None]
        for model in models:
            model.load_state_dict(dict(models[0].named_parameters()), strict=False)
            model.eval()
            assert torch.equal(model(tokens, places, None), models[0](tokens, places, None))
        config.num_moe_experts = None
        with pytest.raises(ValueError, match="num_moe_experts is None"):
            GPTModel(config, mine, VOCAB, SEQ)

    run_ranks({}, work)


def test_a_scripts_layers_rotate_by_the_models_positions():
    """The config of Megatron says nothing of them."""

    def work(mesh):
        config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)
        rope = {"position_embedding_type": "rope", "rotary_percent": 0.5}
        mine = GPTModel(config, spec_of("a subclass"), VOCAB, SEQ, **rope)
        ours = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ, **rope)
        ours.load_state_dict(dict(mine.named_parameters()))
        tokens, places = torch.arange(SEQ)[None] % VOCAB, torch.arange(SEQ)[None]
        mine.eval(), ours.eval()
        expected = ours(tokens, places, None)
        torch.testing.assert_close(mine(tokens, places, None), expected, rtol=1e-12, atol=1e-12)

    run_ranks({}, work)


@pytest.mark.parametrize("name", ["norms", "parts of parts", "a subclass"])
def test_a_config_divides_the_sequence_outside_of_a_run(name):
    ranks = run_ranks({"tp": 2}, lambda mesh: trained(mesh, name, steps=1, sp=True))
    assert ranks[0][0] == pytest.approx(one_process(name)[0][:2], rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["E|ttL", [["embedding", "decoder", "decoder"], ["loss"]]], ids=["text", "list"])
def test_the_config_of_a_model_may_have_a_pipeline_layout(layout):
    expected_losses, expected = one_process("a layer")
    outcomes = run_ranks({"pp": 2}, lambda mesh: trained(mesh, "a layer", layout=layout))
    assert outcomes[-1][0] == pytest.approx(expected_losses, rel=1e-12)
    got = put_together([pieces for _, pieces in outcomes])
    assert got.keys() == expected.keys()
    assert max((got[name] - tensor).abs().max() for name, tensor in expected.items()) <= 1e-12
