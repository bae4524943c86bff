"""FLOPs by layer: equal to the closed forms of a whole model, in every layout, and to the products that torch counts."""

import importlib
import sys
from dataclasses import replace
from math import prod

import pytest
import torch
from local_ranks import run_ranks
from same_code import ROOT
from script_run import trainer_of
from tiny_run import GPT2, LLAMA, TINY_GPT2, TINY_LLAMA
from tiny_t5 import CONFIGS as T5_CONFIGS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pretrain_gpt
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.ops.count_flops_by_module import (
    Flops,
    FlopsRecord,
    LayerInput,
    attention_flops,
    flops_of,
    stage_flops,
    weight_flops,
)
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora import add_lora
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape, TwoStackShape

for folder in ("lora", "fake_fp8", "toy_moe"):
    sys.path.insert(0, str(ROOT / "examples" / folder))
LORA = importlib.import_module("lora")
FP8 = importlib.import_module("fake_fp8")
MOE = importlib.import_module("experts")

VOCAB, TOKENS, DECODER = 61, 8, 5


def context(**options) -> LayerContext:
    return LayerContext.from_mesh(single_rank_mesh(), torch.float64, **options)


def gpt(config: ModelConfig, vocab: int = VOCAB, tokens: int = TOKENS, kind=GPTModel, **options) -> GPTModel:
    parts = {"vocab_size": vocab, "positions": tokens, "layers": range(config.num_layers)}
    return kind(config, context=context(**options), **parts)


# ---------------------------------------------------------------- closed forms

GPTS = {
    "gpt2": GPT2,
    "llama": LLAMA,  # grouped queries, a gate, untied
    "narrow heads": replace(LLAMA, kv_channels=6, num_query_groups=1),
    "windows": replace(LLAMA, window_size="2,0", window_attn_skip_freq="3"),
    "a window of all": replace(GPT2, window_size="7,0"),
    "parallel": replace(GPT2, norm_placement="parallel-one-norm"),
    "recomputed": replace(LLAMA, recompute_granularity="full", recompute_method="uniform"),
}


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_counts_what_the_closed_form_counts(name: str):
    model, shape = gpt(GPTS[name], device="meta"), ModelShape.of(GPTS[name], VOCAB, TOKENS)
    flops = stage_flops(model, TOKENS)
    assert flops.model == shape.flops_per_sample and flops.dgrad + flops.wgrad == 2 * flops.forward
    assert flops.model // TOKENS == shape.flops_per_token()
    assert stage_flops(model, TOKENS, full_attention=True).model == shape.count_flops(full_attention=True)


def test_a_bert_and_a_t5_count_what_their_closed_forms_count():
    parts = {"vocab_size": VOCAB, "positions": TOKENS, "context": context(device="meta")}

    def in_two_stages(kind, config: ModelConfig, split: int, **more) -> Flops:
        first = kind(config, layers=range(split), post_process=False, **parts, **more)
        second = kind(config, layers=range(split, config.all_layers), pre_process=False, **parts, **more)
        return stage_flops(first, TOKENS) + stage_flops(second, TOKENS, is_first=False)

    for config in (TINY_GPT2, TINY_LLAMA):
        bert = BertModel(config, layers=range(config.num_layers), **parts)
        shape = replace(ModelShape.of(config, VOCAB, TOKENS), is_bert=True)
        flops = stage_flops(bert, TOKENS)
        assert flops.model == shape.flops_per_sample and flops == in_two_stages(BertModel, config, 3)
    for config in T5_CONFIGS.values():
        decoder = {"decoder_seq_length": DECODER}
        t5 = T5Model(config, layers=range(config.all_layers), **decoder, **parts)
        shape = TwoStackShape(ModelShape.of(config, VOCAB, TOKENS), config.decoder_layers, DECODER)
        for full in (False, True):
            flops = stage_flops(t5, TOKENS, full_attention=full)
            assert flops.model == shape.count_flops(full_attention=full)
        for split in (3, config.num_layers, config.num_layers + 1):
            assert in_two_stages(T5Model, config, split, **decoder) == stage_flops(t5, TOKENS)


def test_recomputed_gpt3_has_the_published_hardware_flops():
    """arXiv:2104.04473, equation 3: 96 B s L h^2 (1 + s / 6h + V / 16 L h), and arXiv:2205.05198: 72 B L s h^2 (1 + s / 6h + V / 12 h L) of
    the model. Both count full attention."""
    layers, h, s, vocab = 96, 12288, 2048, 51200
    sizes = {"num_layers": layers, "hidden_size": h, "num_attention_heads": 96}
    config = ModelConfig(**sizes, recompute_granularity="full", recompute_method="uniform")
    flops = stage_flops(gpt(config, vocab, s, device="meta"), s, full_attention=True)
    assert flops.hardware == pytest.approx(
        96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h)), rel=1e-14
    )
    assert flops.model == pytest.approx(
        72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)), rel=1e-14
    )


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ({"recompute_granularity": "selective"}, "core"),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, "mlp"),
        ({"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}, ""),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, "layer"),
    ],
    ids=["core attention", "mlp", "norms", "one layer"],
)
def test_only_what_is_recomputed_counts_again(recompute: dict, again: str):
    """Of core attention 4 s^2 h for each layer, arXiv:2205.05198, section 5; causal attention counts half."""
    config = replace(GPT2, **recompute)
    h, layers = config.hidden_size, config.num_layers
    core, mlp = 2 * TOKENS**2 * h, 2 * TOKENS * 8 * h**2
    expected = {"core": layers * core, "mlp": layers * mlp, "": 0, "layer": core + mlp + 2 * TOKENS * 4 * h**2}[again]
    flops, plain = stage_flops(gpt(config, device="meta"), TOKENS), stage_flops(gpt(GPT2, device="meta"), TOKENS)
    assert (flops.recompute, flops.model) == (expected, plain.model) and flops.hardware == plain.model + expected


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 4}, {"cp": 2, "pp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_stages_add_up_to_the_model_in_every_layout(sizes: dict):
    """The heads of two groups are shared by ranks at TP 4; a vocabulary of 61 is padded."""
    config = replace(LLAMA, num_query_groups=2, window_size="2,0", window_attn_skip_freq="2")
    for one in (config, GPT2):

        def counted(mesh: Mesh, config: ModelConfig = one) -> Flops:
            stages, stage = mesh["pp"].size, mesh["pp"].rank
            model = GPTModel(
                config,
                vocab_size=VOCAB,
                positions=TOKENS,
                layers=split_layers(config.num_layers, stages)[stage],
                context=LayerContext.from_mesh(mesh, torch.float64, device="meta"),
                pre_process=stage == 0,
                post_process=stage == stages - 1,
            )
            return stage_flops(model, TOKENS, is_first=stage == 0)

        ranks_of_stage = prod(size for axis, size in sizes.items() if axis != "pp")
        heads_shared = {"ranks_per_kv_head": 2} if sizes.get("tp") == 4 and one is config else {}
        total = sum((flops.model for flops in run_ranks(sizes, counted, **heads_shared)), 0)
        assert total == ranks_of_stage * ModelShape.of(one, VOCAB, TOKENS).flops_per_sample


def test_the_log_has_the_sum_of_the_stages():
    """Also of windows, and where a rank has released its parameters."""
    flags = (
        "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --tokenizer-type NullTokenizer "
        "--vocab-size 31 --micro-batch-size 1 --lr 0.1 --train-iters 1 --eval-iters 0 --device cpu --log-throughput --window-size 4,0 "
        "--window-attn-skip-freq 2 "
    )

    def logged(mesh: Mesh) -> float:
        with trainer_of(
            pretrain_gpt, mesh, flags + f"--pipeline-model-parallel-size {mesh['pp'].size}", predicts=False
        ) as trainer:
            return trainer.log.device_flops_per_sample

    config = ModelConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, window_size="4,0", window_attn_skip_freq="2"
    )
    expected = ModelShape.of(config, 32, 16).flops_per_sample
    assert run_ranks({}, logged) == [expected]
    assert run_ranks({"pp": 2}, logged) == [expected / 2] * 2
    flags += "--zero-stage 3 --global-batch-size 2 "
    assert run_ranks({"dp": 2}, logged) == [expected / 2] * 2


# ---------------------------------------------------------------- what torch counts


def counted_by_torch(model: nn.Module, tokens: int = TOKENS) -> int:
    """The FLOPs of all products of a forward and its backward, of one sample."""
    ids = torch.arange(tokens)[None] % VOCAB

    def flops_in_place(total: torch.Size, a: torch.Size, b: torch.Size, **_) -> int:
        return 2 * a.numel() * b[1]

    in_place = {torch.ops.aten.addmm_: flops_in_place}  # torch counts only the form with a result of its own
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(ids, ids, labels=ids).sum().backward()
    return counter.get_total_flops()


# the plain kernel multiplies hidden scores, too; a vocabulary without padding
PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_backend": "unfused",
    "make_vocab_size_divisible_by": 1,
}
TRAINED = {"gpt2": replace(TINY_GPT2, **PLAIN), "llama": replace(TINY_LLAMA, **PLAIN)}


def lora(config: ModelConfig, **options) -> nn.Module:
    model = gpt(config, **options)
    LORA.add_lora(model, rank=2)
    return model


def fp8(config: ModelConfig, **options) -> nn.Module:
    return gpt(config, kind=FP8.FakeFp8GPTModel, **options)


def frozen_embedding(config: ModelConfig, **options) -> nn.Module:
    """Nothing needs the gradient of the first layer's input."""
    model = gpt(replace(config, untie_embeddings_and_output_weights=True), **options)
    model.language_model.embedding.requires_grad_(False)
    model.language_model.decoder.layers[0].input_layernorm.requires_grad_(False)
    return model


def frozen_layers(config: ModelConfig, **options) -> nn.Module:
    """The backward ends at the third layer's norm; the tied weight is frozen too."""
    model = gpt(config, **options)
    model.language_model.embedding.requires_grad_(False)
    for layer in list(model.language_model.decoder.layers)[:2]:
        layer.requires_grad_(False)
    return model


def experts(config: ModelConfig, **options) -> nn.Module:
    """A token goes to two of four experts, of any load."""
    spec = MOE.spec_of(config, MOE.ToyMoEConfig(toy_experts=4, toy_expert_width=6))
    parts = {"vocab_size": VOCAB, "positions": TOKENS, "layers": range(config.num_layers)}
    place = context(**options)
    place.aux_losses.declare("load balance")
    return MOE.ToyMoEModel(config, context=place, spec=spec, **parts)


def lora_of_experts(config: ModelConfig, **options) -> nn.Module:
    """A token goes to two of four experts, of any load, and each has adapters."""
    model = gpt(replace(config, num_experts=4, moe_ffn_hidden_size=6), **options)
    # one pair for all rows of q|k|v: parts that repeat by groups are computed by one product with zeros, which torch counts
    targets = ["linear_qkv", "linear_proj", "experts.linear_fc1", "experts.linear_fc2"]
    add_lora(model, LoRAConfig(lora_rank=2, lora_target_modules=targets))
    return model


@pytest.mark.parametrize("config", TRAINED)
@pytest.mark.parametrize("make", [gpt, lora, lora_of_experts, fp8, frozen_embedding, frozen_layers, experts])
def test_the_products_are_those_that_torch_counts(make, config: str):
    """Of a forward and a backward. Attention by the plain kernel, which multiplies the scores that are hidden as well."""
    torch.manual_seed(1)
    model = make(TRAINED[config])
    flops = stage_flops(model, TOKENS, full_attention=True)
    assert counted_by_torch(model) == flops.model
    if make is lora:
        frozen = stage_flops(gpt(TRAINED[config], device="meta"), TOKENS, full_attention=True)
        assert flops.wgrad < 0.2 * frozen.wgrad and flops.dgrad > 0.8 * frozen.dgrad
    if make is fp8:
        assert flops == stage_flops(gpt(TRAINED[config], device="meta"), TOKENS, full_attention=True)


RECOMPUTED = {
    "layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "tiles": {"tiled_mlp": 2, "tiled_loss": 2},  # each of which is computed again
}


@pytest.mark.parametrize(("make", "name"), [(lora, "layers"), *((gpt, name) for name in RECOMPUTED)])
def test_recomputed_products_are_those_that_torch_counts(make, name: str):
    torch.manual_seed(1)
    model = make(replace(TRAINED["llama"], **RECOMPUTED[name]))
    flops = stage_flops(model, TOKENS, full_attention=True)
    assert counted_by_torch(model) == flops.hardware > flops.model


def test_a_recomputation_that_stops_early_counts_whole():
    """A layer's stops before the second tile of its MLP, from which the backward needs the input alone."""
    torch.manual_seed(1)
    config = replace(TRAINED["llama"], recompute_granularity="full", recompute_method="uniform", tiled_mlp=2)
    model = gpt(config)
    tile = 2 * TOKENS // 2 * 3 * config.hidden_size * config.ffn_size
    hardware = stage_flops(model, TOKENS, full_attention=True).hardware
    assert hardware - counted_by_torch(model) == config.num_layers * tile


# ---------------------------------------------------------------- layers of a script's own


class Convolution(nn.Module):
    """A depthwise causal convolution over the sequence: it holds a matrix, and says its FLOPs if asked to."""

    def __init__(self, width: int, kernel: int = 3):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(width, kernel))


class CountedConvolution(Convolution):
    def count_flops(self, x: LayerInput) -> Flops:
        return weight_flops(x, self.kernel)


class Block(nn.Module):
    """A module that says nothing."""

    def __init__(self, convolution: nn.Module):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)])
        self.convolution = convolution


def test_a_module_that_says_nothing_counts_what_is_below_it():
    by_hand = 2 * 10 * (4 * 6 + 6 * 4)
    record = FlopsRecord()
    silent = Block(Convolution(4))
    assert flops_of(silent, LayerInput(10, record=record)) == Flops(by_hand, by_hand, by_hand)
    assert record.uncounted_in(silent) == ["convolution"], "its matrix is named"
    more = by_hand + 2 * 10 * 4 * 3
    record = FlopsRecord()
    assert flops_of(Block(CountedConvolution(4)), LayerInput(10, record=record)) == Flops(more, more, more)
    assert record.uncounted == set() and len(record.by_module) == 6


def test_frozen_weights_have_no_gradient_and_a_frozen_start_has_none_of_its_input():
    block = Block(nn.Identity())
    first, last = 2 * 10 * 24, 2 * 10 * 24
    assert flops_of(block, LayerInput(10, requires_grad=False)) == Flops(first + last, last, first + last)
    block.linears[0].requires_grad_(False)
    assert flops_of(block, LayerInput(10, requires_grad=False)) == Flops(first + last, 0, last)
    assert flops_of(block, LayerInput(10)) == Flops(first + last, first + last, last)


def test_a_subclass_of_ours_counts_its_further_linears():
    class WithHead(GPTModel):
        def __init__(self, config, **parts):
            super().__init__(config, **parts)
            self.further = ColumnParallelLinear(32, 7, tp=self.context.tp, init=config.init)

    class CountedCore(nn.Module):
        def count_flops(self, x: LayerInput) -> Flops:
            return attention_flops(x, 4, value_width=2)

    plain, model = gpt(GPT2, device="meta"), gpt(GPT2, kind=WithHead, device="meta")
    more = stage_flops(model, TOKENS).model - stage_flops(plain, TOKENS).model
    assert more == 6 * TOKENS * 32 * 7

    # a core attention that says nothing counts as ours; one that speaks is heard
    attention = plain.language_model.decoder.layers[0].self_attention
    before = flops_of(attention, LayerInput(TOKENS)).forward
    attention.core_attention = nn.Identity()
    assert flops_of(attention, LayerInput(TOKENS)).forward == before
    attention.core_attention = CountedCore()
    assert before - flops_of(attention, LayerInput(TOKENS)).forward == TOKENS**2 * (2 * 32 - (4 + 2))
