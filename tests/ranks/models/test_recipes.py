"""Each recipe in examples/recipes parses, has the published number of parameters, and in a tiny form trains at TP 2 x PP 2."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pretrain_t5
import pytest
from tiny_bert import BERT
from tiny_run import GPT, Layout, run
from tiny_t5 import T5

from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.config import Config
from megatron.training.arguments.validation import check

FOLDER = Path(__file__).parents[3] / "examples" / "recipes"
# But those that go on from weights, which tests/ranks/convert/test_longer_context.py runs.
RECIPES = sorted((path for path in FOLDER.glob("*.yaml") if path.stem != "longer-context"), reverse=True)
# Of each script but GPT's: its model, what the tiny form is trained on, and its own defaults of settings.
OTHERS = {"bert": (BertModel, BERT, {}), "t5": (T5Model, T5, pretrain_t5.DEFAULTS | {"decoder_num_layers": 0})}
RUN = ["--train-iters", "1000", "--mock-data", "--tokenizer-type", "NullTokenizer"]
# Of transformers' classes on the meta device, 5.23.0, with the published fields.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "pythia-70m": 70_426_624,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-tiny": 2_692_224,
    "qwen3-moe-tiny": 1_516_928,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "olmo-3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-3b": 3_030_371_328,
    "granite-3.0-2b": 2_533_531_648,
    "command-r-35b": 34_980_831_232,
    "bert-base": 110_106_428,
    "t5-small": 60_506_624,
    "tiny": 854_400,
}


def kind_of(path: Path) -> tuple:
    return OTHERS.get(path.stem.split("-")[0], (GPTModel, GPT, {}))


def settings_of(path: Path) -> Config:
    config, _, notes = parse_args(["--yaml-cfg", str(path), *RUN], args_defaults=kind_of(path)[2])
    assert not [note for note in notes if "is given" not in note], notes
    return config


def parameters_of(path: Path, config: Config) -> int:
    model = config.transformer
    parts = {
        "layers": range(model.all_layers),
        "positions": config.data.seq_length,
        "vocab_size": config.tokenizer.vocab_size,
    }
    context = LayerContext.from_mesh(single_rank_mesh(), model.params_dtype, device="meta", fills=False)
    parts |= {"decoder_seq_length": config.data.decoder_seq_length} if model.decoder_layers else {}
    made = kind_of(path)[0](model, context=context, **parts)
    return sum(math.prod(parameter.placement.shape) for parameter in made.parameters())


def tiny_form(model: ModelConfig) -> ModelConfig:
    """The same options at a size for tests."""
    groups = {1: 1, model.num_attention_heads: 4}.get(model.num_query_groups, 2)
    return replace(
        model,
        num_layers=4,
        decoder_num_layers=model.decoder_num_layers and 4,
        hidden_size=40,
        num_attention_heads=4,
        num_query_groups=groups if model.group_query_attention else 1,
        kv_channels=model.kv_channels and 12,
        ffn_hidden_size=40,
        make_vocab_size_divisible_by=1,
        window_size=model.window_size and "2,0",
        window_attn_skip_freq=model.window_attn_skip_freq and "2",
        num_experts=model.num_experts and 8,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size and 24,
        moe_router_topk=min(model.moe_router_topk, 4),
        bf16=False,
        fp64=True,
    )


def test_every_recipe_has_a_number():
    assert {path.stem for path in RECIPES} == {*PUBLISHED}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_has_the_published_parameters(path: Path):
    config = settings_of(path)
    check(config, config.parallel.tensor_model_parallel_size)
    assert parameters_of(path, config) == PUBLISHED[path.stem]
    text = path.read_text()
    (said,) = re.findall(r"([\d,]+) parameters", text.split("\n")[0])
    model = config.transformer
    has_end_of_document = "tokenizer-type: NullTokenizer" in text  # a token more than words, in each table of words
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    assert int(said.replace(",", "")) == PUBLISHED[path.stem] + has_end_of_document * tables * model.hidden_size


@pytest.mark.full
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_tiny_form_trains_at_tp_2_and_pp_2(path: Path):
    subject = kind_of(path)[1]
    again = replace(
        subject, sample=lambda number, texts: subject.sample(number % 4, texts)
    )  # four texts, to learn by heart
    config, layout = tiny_form(settings_of(path).transformer), Layout(tp=2, sp=True, pp=2, m=2)
    losses = run(
        config, layout, steps=20, global_batch=4, subject=again, optimizer=OptimizerConfig(clip_grad=1.0)
    ).losses
    assert losses[-1] < 0.9 * losses[0], losses
