"""Names that are data: a checkpoint, a cache, a log or a command line has them, so a rename breaks what users keep.

    python tests/campaigns/frozen_names.py > tests/campaigns/frozen_names.json       write the list as it is now

Parameter names and dropout sites seed random numbers. Fields of configs, keys of tables and keys of the state are in checkpoints.
Names of fields are hashed into the names of caches. All are collected from the running product: `quick()` reads its tables and
builds models, `whole()` runs it, reads what the runs write, and asks the parsers of scripts and tools.

A list is {part: {group: [name, ...]}}. Where a value matters as much as its name, the entry is `name = value`.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.machinery
import inspect
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

# Where the product's names are: the only lines here that change when a file of the product moves.
PRODUCT = {
    # models
    "gpt": "megatron.core.models.gpt.gpt_stage:GPTModel",
    "bert": "megatron.core.models.bert.bert_stage:BertModel",
    "t5": "megatron.core.models.T5.t5_stage:T5Model",
    "layer context": "megatron.core.transformer.layer_parallel_context:LayerContext",
    "dropout keys": "megatron.core.ops.layout_invariant_dropout:SampleDropoutKeys",
    "norm placements": "megatron.core.transformer.activation_norm_placement_multiplier_config:NORM_PLACEMENTS",
    "seed": "megatron.core.sharding.initial_values:seed_of",
    "seed of dropout": "megatron.core.ops.layout_invariant_dropout:seed_of",
    # what is given the name of a dropout site
    "dropout": "megatron.core.ops.layout_invariant_dropout:KeyedDropout",
    "hidden dropout": "megatron.core.ops.layout_invariant_dropout:HiddenDropout",
    "dropout of a context": "megatron.core.transformer.layer_parallel_context:LayerContext.hidden_dropout",
    # Megatron's classes
    "Megatron's TransformerConfig": "megatron.core.transformer.transformer_config:TransformerConfig",
    "Megatron's ModelParallelConfig": "megatron.core.model_parallel_config:ModelParallelConfig",
    "Megatron's OptimizerConfig": "megatron.core.optimizer.optimizer_config:OptimizerConfig",
    "Megatron's DistributedDataParallelConfig": "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
    "Megatron's GPTDatasetConfig": "megatron.core.datasets.gpt_dataset:GPTDatasetConfig",
    "Megatron's BERTMaskedWordPieceDatasetConfig": "megatron.core.datasets.bert_dataset:BERTMaskedWordPieceDatasetConfig",
    "Megatron's GPTModel": "megatron.core.models.gpt.gpt_model:GPTModel",
    "Megatron's BertModel": "megatron.core.models.bert.bert_model:BertModel",
    "Megatron's T5Model": "megatron.core.models.T5.t5_model:T5Model",
    "local layers of a GPT": "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
    "engine layers of a GPT": "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
    "local layers of a BERT": "megatron.core.models.bert.bert_layer_specs:bert_layer_local_spec",
    "local layers of T5's encoder": "megatron.core.models.T5.t5_spec:get_t5_encoder_with_local_block_spec",
    "local layers of T5's decoder": "megatron.core.models.T5.t5_spec:get_t5_decoder_with_local_block_spec",
    # settings
    "config": "megatron.training.arguments.config:Config",
    "config classes": "megatron.training.arguments.config:COMPONENTS",
    "other flags without effect": "megatron.training.arguments.ignored_and_refused_flags:NO_EFFECT",
    "other flags accepted in silence": "megatron.training.arguments.ignored_and_refused_flags:SILENT",
    "other flags accepted with a warning": "megatron.training.arguments.ignored_and_refused_flags:WARNED",
    "other flags refused": "megatron.training.arguments.ignored_and_refused_flags:REFUSED",
    "shorthand flags": "megatron.training.arguments.ignored_and_refused_flags:SHORTHAND",
    "DeepSpeed's keys": "megatron.deepspeed.settings:KEYS",
    # what a resume compares
    "parts not compared": "megatron.training.arguments.compare_settings_with_checkpoint:NOT_COMPARED_PARTS",
    "settings not compared": "megatron.training.arguments.compare_settings_with_checkpoint:NOT_COMPARED",
    "precision": "megatron.training.arguments.compare_settings_with_checkpoint:PRECISION",
    "scaling of rotation": "megatron.training.arguments.compare_settings_with_checkpoint:SCALING",
    "rotation": "megatron.training.arguments.compare_settings_with_checkpoint:ROPE",
    "course of the model": "megatron.training.arguments.compare_settings_with_checkpoint:COURSE_OF_MODEL",
    "by the tokenizer's content": "megatron.training.arguments.compare_settings_with_checkpoint:BY_TOKENIZER",
    "by the data's content": "megatron.training.arguments.compare_settings_with_checkpoint:BY_DATA",
    "of widths": "megatron.training.arguments.compare_settings_with_checkpoint:OF_WIDTHS",
    # tables that scripts extend, and tables whose keys are values of flags or of checkpoints
    "table": "megatron.core.base.registry_with_checked_entries:Registry",
    "SCHEDULES": "megatron.core.pipeline_parallel.schedule.registry:SCHEDULES",
    "KERNELS": "megatron.core.ops.attention.kernels:KERNELS",
    "CACHES": "megatron.core.ops.attention.kv_cache:CACHES",
    "OPTIMIZERS": "megatron.core.optimizer.optimizer_flags_and_registry:OPTIMIZERS",
    "TOKENIZERS": "megatron.core.tokenizers.tokenizer_registry:TOKENIZERS",
    "METHODS": "megatron.core.context_parallel.cp_attention:METHODS",
    "FAMILIES": "megatron.convert.families.registry:FAMILIES",
    "regions": "megatron.core.ops.fused_layer_ops:REGIONS",
    "rotary scalings": "megatron.core.transformer.position_config:ROPE_SCALINGS",
    "models by the name in a checkpoint": "megatron.core.transformer.expected_parameter_names:PARAMETER_NAMES",
    "models that generate": "megatron.core.inference.load_model:MODELS",
    "ways of a product": "megatron.core.ops.cpu_half_precision_matmul:MATMUL_MODES",
    "checks of the guard": "megatron.training.result_checks.check_runner:CHECKS",
    "DeepSpeed's schedules": "megatron.core.optimizer.deepspeed_lr_schedules:STEP_SCHEDULES",
    "coefficients of Newton-Schulz": "megatron.core.optimizer.muon_config:NS_COEFFICIENTS",
    "operations of an exchange": "megatron.convert.families.strided_views_of_hf_weights:OPERATIONS",
    # formats
    "format": "megatron.core.dist_checkpointing.manifest_format:FORMAT",
    "format's version": "megatron.core.dist_checkpointing.manifest_format:FORMAT_VERSION",
    "manifest": "megatron.core.dist_checkpointing.manifest_format:MANIFEST",
    "latest": "megatron.core.dist_checkpointing.manifest_format:LATEST",
    "partial": "megatron.core.dist_checkpointing.manifest_format:PARTIAL",
    "replaced": "megatron.core.dist_checkpointing.manifest_format:REPLACED",
    "spoiled": "megatron.core.dist_checkpointing.manifest_format:SPOILED",
    "dtypes": "megatron.core.dist_checkpointing.manifest_format:ITEM_BYTES",
    "functions": "megatron.core.base.registry_with_checked_entries:FUNCTIONS",
    "lost buffers": "megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint:LOST_BUFFERS",
    "buffers at the start": "megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint:BUFFERS_AT_START",
    "absent heads": "megatron.convert.missing_params_and_absent_heads:ABSENT_HEADS",
    "batches of a dump": "megatron.training.result_checks.step_dump:BATCH",
    # hashes
    "data config": "megatron.core.datasets.data_config:DataConfig",
    "masked data config": "megatron.core.datasets.choose_masked_spans:MaskedDataConfig",
    "tokenizer config": "megatron.core.tokenizers.tokenizer_config_and_build:TokenizerConfig",
    "build a tokenizer": "megatron.core.tokenizers:build_tokenizer",
    "hash of a tokenizer": "megatron.core.tokenizers.tokenizer_sha256:tokenizer_sha256",
    "hash of data": "megatron.core.datasets.token_files_sha256:data_sha256",
    "data of a GPT": "megatron.core.datasets:build_gpt_datasets",
    "data of a BERT": "megatron.core.datasets.bert_dataset_builder:build_bert_datasets",
    "data of a T5": "megatron.core.datasets.t5_dataset_builder:build_t5_datasets",
    # communication, and what a job says of its ranks
    "call": "megatron.core.parallel.collectives:Call",
    "phases": "megatron.core.base.rank_status:PHASES",
    "operations": "megatron.core.base.rank_status:OPS",
    "error file": "megatron.core.base.user_error_and_torchrun_error_file:write_error_file",
    "initialize": "megatron.deepspeed:initialize",
    "estimate": "tools.estimate_memory:main",
    "benchmark": "tools.benchmark:main",
    "not finite": "megatron.training.step:NotFiniteError",
}
SITE = "site"  # the argument that names a dropout site
KNOB = "config_field"  # the attribute of an argparse action that holds the field it was made from
SCRIPTS = {kind: f"pretrain_{kind}.py" for kind in ("gpt", "bert", "t5")}
PRODUCT_FOLDERS = ("megatron",)

Group = list[str]
Part = dict[str, Group]


def product(label: str) -> Any:
    """What `PRODUCT` names."""
    module, _, names = PRODUCT[label].partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def shown(value: Any) -> str:
    """A default or a constant, the same in every process."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__name__
    return repr(value)


# ---------------------------------------------------------------- models


def models() -> dict[str, tuple[str, Any]]:
    """Name of a variant -> (gpt, bert or t5, its settings)."""
    import tiny_t5
    from tiny_run import TINY_GPT2, TINY_LLAMA

    gpt2 = replace(TINY_GPT2, num_layers=2)
    llama = replace(TINY_LLAMA, num_layers=2)
    variants = {
        "gpt2": gpt2,
        "llama": llama,
        **{f"norm placement {name}": replace(gpt2, norm_placement=name) for name in product("norm placements")},
        "LayerNorm without bias": replace(gpt2, norm_bias=False),
        "norms that start at 0": replace(gpt2, apply_layernorm_1p=True),
        "norms of heads": replace(llama, qk_layernorm=True),
        "learnable sinks": replace(llama, softmax_type="learnable"),
        "biases one by one": replace(
            llama, add_qkv_bias=True, add_attention_output_bias=True, add_mlp_bias=True, add_output_bias=True
        ),
        "gated, with biases": replace(gpt2, gated=True),
        "relative positions": replace(gpt2, position_embedding_type="relative"),
        "no positions": replace(gpt2, position_embedding_type="none"),
        "experts": replace(
            llama,
            num_experts=4,
            moe_layer_freq="[0,1]",
            add_mlp_bias=True,
            moe_router_bias=True,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_shared_expert_intermediate_size=8,
            moe_shared_expert_gate=True,
        ),
    }
    t5 = {name: replace(config, num_layers=2, decoder_num_layers=2) for name, config in tiny_t5.CONFIGS.items()}
    return {
        **{name: ("gpt", config) for name, config in variants.items()},
        "bert": ("bert", gpt2),
        "bert, as published": ("bert", replace(gpt2, norm_placement="post")),
        "bert of Llama's parts": ("bert", llama),
        **{f"t5, {name}": ("t5", config) for name, config in t5.items()},
    }


def subject(kind: str) -> Any:
    """How a model of this kind is made and trained by the tests' small trainer."""
    from tiny_run import GPT, SEQ, Subject
    from tiny_t5 import T5

    def make_bert(config: Any, **parts: Any) -> Any:
        return product("bert")(config, positions=SEQ, **parts)

    return {"gpt": GPT, "t5": T5, "bert": Subject(make_bert, forward_of_bert, sample_of_bert)}[kind]


def sample_of_bert(number: int, texts: Any) -> dict[str, Any]:
    import torch
    from tiny_run import SEQ

    words = torch.arange(number, number + SEQ)
    return {"text": words, "types": words % 2, "padding_mask": torch.ones(SEQ, dtype=torch.long), "labels": words}


def forward_of_bert(data: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable]:
    batch = next(data)
    output = model(batch["text"], batch["padding_mask"], batch["types"], batch["labels"])

    def loss_func(given: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
        losses, order = given
        loss = losses.mean() + order.mean()
        return loss, {"lm loss": loss.detach()}

    return output, loss_func


def of_one_rank(work: Callable[[Any], Any]) -> Any:
    from local_ranks import run_ranks

    return run_ranks({"tp": 1}, work)[0]


def shapes(module: Any) -> Group:
    return [f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters()]


def parameters() -> Part:
    from tiny_run import VOCAB

    def build(mesh: Any) -> Part:
        groups = {}
        for name, (kind, config) in models().items():
            context = product("layer context").from_mesh(mesh, config.params_dtype, product("dropout keys")(0))
            parts = {"context": context, "pre_process": True, "post_process": True}
            model = subject(kind).make(config, vocab_size=VOCAB, layers=range(config.all_layers), **parts)
            groups[f"parameters: {name}"] = shapes(model)
        return groups

    return of_one_rank(build)


def parameters_of_megatrons_classes() -> Part:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}

    def build(mesh: Any) -> Part:
        config = lambda **more: product("Megatron's TransformerConfig")(**sizes | more)  # noqa: E731
        gpt, bert, t5 = (product(f"Megatron's {name}Model") for name in ("GPT", "Bert", "T5"))
        two = {"transformer_encoder_layer_spec": product("local layers of T5's encoder")(2)}
        two["transformer_decoder_layer_spec"] = product("local layers of T5's decoder")(2)
        local, engine = product("local layers of a GPT"), product("engine layers of a GPT")
        made = {
            "GPTModel of local layers": gpt(config(), local(), 64, 8),
            "GPTModel of engine layers": gpt(config(), engine(), 64, 8),
            "GPTModel with norms of heads": gpt(config(qk_layernorm=True), engine(qk_layernorm=True), 64, 8),
            "GPTModel with gated layers": gpt(
                config(gated_linear_unit=True, activation_func=functional().silu), local(), 64, 8
            ),
            "BertModel": bert(config(), 2, product("local layers of a BERT"), 64, 8),
            "T5Model": t5(config=config(), encoder_config=config(), vocab_size=64, max_sequence_length=8, **two),
        }
        return {f"parameters: Megatron's {name}": shapes(model) for name, model in made.items()}

    from torch import distributed

    has_joined = distributed.is_initialized()
    try:
        return of_one_rank(build)
    finally:  # Megatron's models join torch.distributed, as a job of one process
        if not has_joined:
            distributed.destroy_process_group()


def functional() -> Any:
    from torch.nn import functional as found

    return found


# ---------------------------------------------------------------- dropout


def sites_in_text() -> Part:
    """The literals with which dropout is made anywhere in the product; of any other expression its source."""
    takers = [product("dropout"), product("hidden dropout"), product("dropout of a context")]
    place = {}  # name of a taker -> position of the site among its arguments
    for taker in takers:
        names = list(inspect.signature(taker).parameters)
        place[taker.__name__] = names.index(SITE) - (names[0] == "self")
    found = set()
    for tree in trees(place):
        for scope in ast.walk(tree):
            if isinstance(scope, ast.ClassDef):
                bases = [last_name(base) for base in scope.bases if last_name(base) in place]
                for call in ast.walk(scope) if bases else ():
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                        found |= site_of(call, place[bases[0]])
            if isinstance(scope, ast.Call) and last_name(scope.func) in place:
                found |= site_of(scope, place[last_name(scope.func)])
    return {"dropout sites": sorted(found)}


def product_files() -> list[Path]:
    return sorted(path for folder in PRODUCT_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def trees(names: Iterable[str]) -> Iterator[ast.Module]:
    """Of the product's files that have one of the names in them."""
    for path in product_files():
        if any(name in (text := path.read_text()) for name in names):
            yield ast.parse(text)


def last_name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def site_of(call: ast.Call, position: int) -> set[str]:
    given = next((one.value for one in call.keywords if one.arg == SITE), None)
    if given is None and position < len(call.args):
        given = call.args[position]
    if given is None or ast.unparse(given) == SITE:  # handed on
        return set()
    return {given.value if isinstance(given, ast.Constant) else f"an expression: {ast.unparse(given)}"}


def seeds() -> Part:
    """What is hashed into seeds where a small model takes a first step: names of parameters, dropout sites, layers, samples."""
    from tiny_run import Layout, TinyTrainer

    seed_of, groups = product("seed"), {}
    known = models()
    chosen = {"gpt": "gpt2", "bert": "bert", "t5": "t5, t5"}
    for kind, name in chosen.items():
        heard: set[str] = set()

        def hear(*key: Any, heard: set[str] = heard) -> int:
            heard.add(" | ".join(map(str, key)))
            return seed_of(*key)

        def step(mesh: Any, kind: str = kind, name: str = name) -> None:
            TinyTrainer(mesh, known[name][1], Layout(), global_batch=2, subject=subject(kind)).step(0)

        with contextlib.ExitStack() as patches:
            for label in ("seed", "seed of dropout"):
                patches.enter_context(mock.patch(PRODUCT[label].replace(":", "."), hear))
            of_one_rank(step)
        groups[f"seeds: {kind}"] = sorted(heard)
    return groups


# ---------------------------------------------------------------- settings and tables


def settings() -> Part:
    groups = {"components of a config": [field.name for field in dataclasses.fields(product("config"))]}
    for name, config_class in product("config classes").items():
        groups[f"settings: {name}"] = [field.name for field in dataclasses.fields(config_class)]
    for label in (label for label in PRODUCT if label.startswith("Megatron's ") and label.endswith("Config")):
        groups[f"settings: {label}"] = [f"{f.name} = {default_of(f)}" for f in dataclasses.fields(product(label))]
    groups["settings: ds_config"] = [
        f"{key}: {answer.status}" for key, answer in product("DeepSpeed's keys").answers.items()
    ]
    return groups


def default_of(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return shown(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else shown(field.default)


OPEN_TABLES = ("SCHEDULES", "KERNELS", "CACHES", "OPTIMIZERS", "TOKENIZERS", "METHODS", "FAMILIES")
CLOSED_TABLES = (
    *("norm placements", "regions", "rotary scalings", "models by the name in a checkpoint", "models that generate"),
    *("ways of a product", "checks of the guard", "DeepSpeed's schedules", "coefficients of Newton-Schulz"),
    "operations of an exchange",
)
COMPARED = (
    *("parts not compared", "settings not compared", "precision", "scaling of rotation", "rotation"),
    *("course of the model", "by the tokenizer's content", "by the data's content", "of widths"),
)


def tables() -> Part:
    """Keys of tables; of an open one also what its entries compute, which a resume compares."""
    groups = {"open tables": open_tables_in_text()}
    for label in OPEN_TABLES:
        table = product(label)
        assert isinstance(table, product("table")), f"{label} is no open table any more"
        computed = {name: getattr(entry, "computes", None) for name, entry in table.items()}
        groups[f"table: {label}"] = [name if what is None else f"{name} = {what}" for name, what in computed.items()]
    for label in CLOSED_TABLES:
        groups[f"table: {label}"] = list(product(label))
    for label in COMPARED:
        names = product(label)
        is_by_reason = isinstance(names, Mapping) and not all(isinstance(value, str) for value in names.values())
        flat = [name for some in names.values() for name in some] if is_by_reason else list(names)
        groups[f"compared at a resume: {label}"] = flat
    return groups


def open_tables_in_text() -> Group:
    """The names of all open tables that are made in the product; `OPEN_TABLES` must have each."""
    kind = product("table").__name__
    found = []
    for tree in trees([f"{kind}("]):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and last_name(call.func) == kind:
                found.append(call.args[0].value)
    assert sorted(found) == sorted(OPEN_TABLES), f"open tables: {sorted(found)}, and here: {sorted(OPEN_TABLES)}"
    return found


def formats() -> Part:
    names = ("format", "format's version", "manifest", "latest", "partial", "replaced", "spoiled")
    of_state = ("functions", "lost buffers", "buffers at the start", "absent heads", "batches of a dump")
    return {
        "files of a checkpoint": [f"{label} = {product(label)}" for label in names],
        "dtypes of a checkpoint": list(product("dtypes")),
        "keys of the state that some runs have": [product(label) for label in of_state],
        "phases of a rank": list(product("phases")),
        "operations of a rank": list(product("operations")),
        "ledger: a call": list(product("call")._fields),
    }


# ---------------------------------------------------------------- hashes


def hashes() -> Part:
    """Names of index caches and digests: they change if a hashed field is renamed. The fields stand beside them."""
    from token_files import WORD_PIECES, WORDS, write_sentences

    groups: Part = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prefixes = [write_sentences(folder / name, 12, (3, 9), seed=number) for number, name in enumerate("ab")]
        blend = ["0.6", prefixes[0], "0.4", prefixes[1]]
        builders = {
            "GPT": (product("data of a GPT"), ()),
            "BERT": (product("data of a BERT"), (product("masked data config")(),)),
        }
        builders["T5"] = (product("data of a T5"), (product("masked data config")(),))
        special = vars(WORD_PIECES) | {"additional_special_tokens_ids": [98, 99], "bos": 2, "eos": 3, "eod": 3}
        tokenizer = types.SimpleNamespace(**special)
        for kind, (build, more) in builders.items():
            cache = folder / kind
            sizes = {"seq_length": 16, "split": "8,1,1", "data_cache_path": str(cache)}
            sizes |= {"decoder_seq_length": 16} if kind == "T5" else {}
            for data, wanted in ((blend, [20, 6, 5]), (prefixes[:1], [None, None, 5])):
                config = product("data config")(data_path=data, **sizes)
                build(config, *more, tokenizer, wanted, 7, say=lambda text: None)
            groups[f"index cache: {kind}"] = sorted(path.name for path in cache.iterdir())
            described = {key for path in cache.glob("*.txt") for key in paths_of(json.loads(path.read_text()))}
            groups[f"index cache: {kind}: fields"] = sorted(described)
        data = product("hash of data")(product("data config")(data_path=blend, seq_length=16))
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(WORDS))
        digests = [f"data = {data}"]
        for name, given in {
            "no words": {"tokenizer_type": "NullTokenizer", "vocab_size": 100},
            "word pieces": {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(vocabulary), "vocab_extra_ids": 5},
        }.items():
            config = product("tokenizer config")(**given)
            digests.append(f"{name} = {product('hash of a tokenizer')(config, product('build a tokenizer')(config))}")
    groups["digests"] = digests
    return groups


def paths_of(value: Any, path: str = "") -> Iterator[str]:
    """The key paths of JSON: a.b, and a.b[] for what a list holds."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from paths_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for one in value:
            yield from paths_of(one, f"{path}[]")
    else:
        yield path


# ---------------------------------------------------------------- runs

SIZES = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1"
WORDS = "--tokenizer-type NullTokenizer --vocab-size 61"
PIECES = "--tokenizer-type BertWordPieceCase --vocab-file {tmp}/vocab.txt --vocab-extra-ids 8"
STEPS = "--mock-data --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu --train-iters 2"
TINY = f"{SIZES} {WORDS} {STEPS}"
OF_FOLDER = f"--hf-config {{tmp}}/hf --seq-length 16 --micro-batch-size 1 --tokenizer-type NullTokenizer {STEPS}"
OF_T5 = f"{SIZES} {PIECES} {STEPS} --seq-length 32 --decoder-seq-length 16"
LOGGED = (
    "--log-throughput --log-num-zeros-in-grad --log-params-norm --log-progress --timing-log-level 2 --inspect 1 "
    "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-timers-to-tensorboard "
    "--tensorboard-log-interval 1 --log-interval 1 --eval-iters 1 --eval-interval 1 --decoupled-lr 0.05 --untie-embeddings-and-output-weights"
)
GUARDED = (
    "--check-for-spiky-loss --check-for-large-grads --log-interval 3 "
    "--weight-decay 0.1 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style cosine"
)
COPIES = "--non-persistent-save-interval 1 --save-interval 2 --non-persistent-ckpt-type"
# Name -> (kind of model, flags); {tmp} is a folder.
RUNS = {
    "gpt": ("gpt", f"{TINY} {GUARDED} --keep-checkpoints 1"),
    "bf16": ("gpt", f"{TINY} --bf16"),
    "fp16": ("gpt", f"{TINY} --fp16 --initial-loss-scale 16"),
    "bf16 with fp32 residuals, sgd": ("gpt", f"{TINY} --bf16 --fp32-residual-connection --optimizer sgd"),
    "muon": ("gpt", f"{TINY} --optimizer muon"),
    "offload": ("gpt", f"{TINY} --optimizer-cpu-offload --optimizer-offload-fraction 1"),
    "copies": ("gpt", f"{TINY} --train-iters 3 {COPIES} global"),
    "local copies": ("gpt", f"{TINY} --train-iters 3 {COPIES} local --non-persistent-local-ckpt-dir {{tmp}}/local"),
    "async save": ("gpt", f"{TINY} --async-save"),
    "model of a folder": ("gpt", OF_FOLDER),
    "bert": ("bert", f"{TINY} --seq-length 32"),
    "t5": ("t5", OF_T5),
}


def run(flags: str, kind: str = "gpt") -> str:
    """A run of one rank in this process; what it printed."""
    import whole_run

    printed = io.StringIO()
    script = importlib.import_module(f"pretrain_{kind}")
    with contextlib.redirect_stdout(printed):
        whole_run.run(flags, script=script, tiny=[])
    return printed.getvalue()


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads(max(folder.glob("iter_*/manifest.json")).read_text())


VALUES = ("state.model", "state.functions", "state.products", "state.dropout_masks")  # texts that a resume compares


def groups_of_manifest(name: str, manifest: dict[str, Any], known: set[str]) -> Part:
    """Key paths of a manifest, of which `known` are named only where they are missing, and its tensors.

    Layers are numbered N, and so are ranks."""
    tensors = manifest.pop("tensors")
    fields = {f"tensors.NAME.{key}" for record in tensors.values() for key in paths_of(record)}
    found = {re.sub(r"rank_\d+", "rank_N", path) for path in paths_of(manifest)}
    keys = [*(found - known), *(f"without {path}" for path in known - found), *fields]
    for start in VALUES:
        keys += [f"{path} = {value}" for path, value in leaves(manifest, start)]
    names = {re.sub(r"\.layers\.\d+\.", ".layers.N.", tensor) for tensor in tensors}
    return {f"manifest: {name}": sorted(keys), f"tensors: {name}": sorted(names)}


def leaves(manifest: dict[str, Any], start: str) -> Iterator[tuple[str, Any]]:
    value: Any = manifest
    for key in start.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict):
        # Which way is the faster one is measured.
        yield from ((f"{start}.{key}", inner) for key, inner in value.items() if start != "state.products")
    elif value is not None:
        yield start, value


def files_in(folder: Path) -> set[str]:
    """Names of files, with N for the key of a run and for numbers."""
    places = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {re.sub(r"run-[0-9a-f]+|\d+", lambda found: "run-N" * ("-" in found[0]) or "N", place) for place in places}


def write_inputs(folder: Path) -> None:
    """The description of a small published GPT-2, and a vocabulary."""
    from token_files import WORDS as PIECES_OF_WORDS

    (folder / "hf").mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 8, "n_head": 2}
    config |= {"n_positions": 16, "vocab_size": 61, "bos_token_id": 60, "eos_token_id": 60, "initializer_range": 0.02}
    (folder / "hf/config.json").write_text(json.dumps(config))
    (folder / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [60], "bos_token_id": 60}))
    (folder / "vocab.txt").write_text("\n".join(PIECES_OF_WORDS))


def manifests() -> Part:
    """What checkpoints of real runs hold, and the files in their folders."""
    groups: Part = {}
    known: set[str] = set()
    for name, (kind, flags) in RUNS.items():
        with tempfile.TemporaryDirectory() as made:
            folder, given = Path(made) / "run", Path(made) / "hf"
            write_inputs(Path(made))
            run(f"{flags.format(tmp=made)} --save {folder}", kind)
            manifest = manifest_of(folder)
            config = {path for path in paths_of(manifest) if path.startswith("state.config.")}
            groups |= groups_of_manifest(name, manifest, known)
            known = known or config
            groups[f"files: {name}"] = sorted(files_in(Path(made)))
            written = (path for path in sorted(Path(made).rglob("*.json")) if given not in path.parents)
            for path in (path for path in written if path.name != product("manifest")):
                place = re.sub(r"\d+", "N", str(path.relative_to(made)))
                groups[f"keys of {place}: {name}"] = sorted(paths_of(json.loads(path.read_text())))
    return groups | sharded_manifests(known) | dump() | engine()


def sharded_manifests(known: set[str]) -> Part:
    """Of ranks as threads that shard optimizer state or parameters, with masters."""
    from local_ranks import run_ranks
    from tiny_run import TINY_GPT2, Layout, TinyTrainer

    groups: Part = {}
    config = replace(TINY_GPT2, num_layers=2, fp64=False, bf16=True)
    for stage in (1, 3):
        layout = Layout(dp=2)
        layout = replace(layout, data_parallel=replace(layout.data_parallel, zero_stage=stage))
        with tempfile.TemporaryDirectory() as made:

            def save(mesh: Any, layout: Any = layout, made: str = made) -> None:
                tiny = TinyTrainer(mesh, config, layout, global_batch=2)
                tiny.step(0)
                tiny.save(Path(made), 1)

            run_ranks(layout.sizes, save)
            groups |= groups_of_manifest(f"ZeRO {stage}", manifest_of(Path(made)), known)
            groups[f"files: ZeRO {stage}"] = sorted(files_in(Path(made)))
    return groups


def dump() -> Part:
    """The step that --bad-step-dir keeps. Its loss is not finite, since the first step's rate is far too large."""
    with tempfile.TemporaryDirectory() as made:
        with contextlib.suppress(product("not finite"), SystemExit), contextlib.redirect_stderr(io.StringIO()):
            run(f"{TINY} --train-iters 4 --lr 1e38 --lr-decay-style constant --bad-step-dir {made}")
        found = manifest_of(Path(made))
    config = {path for path in paths_of(found) if path.startswith("state.config.")}
    return groups_of_manifest("a bad step", found, config)


def engine() -> Part:
    """The checkpoint of an engine that trains a module with buffers in half precision, with masters and a schedule."""
    import torch
    from torch import nn

    given = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    given["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    given["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    with tempfile.TemporaryDirectory() as made:

        def train(mesh: Any) -> None:
            trained, *_ = product("initialize")(model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), config=given)
            trained.backward(trained(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
            trained.step()
            trained.save_checkpoint(made, client_state={"mine": 1})

        of_one_rank(train)
        (manifest,) = Path(made).rglob(product("manifest"))
        groups = groups_of_manifest("an engine", json.loads(manifest.read_text()), set())
        return groups | {"files: an engine": sorted(files_in(Path(made)))}


# ---------------------------------------------------------------- logs and pages


class Curves:
    """In the place of TensorBoard's writer: keeps the names of curves."""

    names: ClassVar[set[str]] = set()

    def __init__(self, *given: Any, **named: Any):
        pass

    def add_scalar(self, name: str, *given: Any) -> None:
        self.names.add(re.sub(r"^(parameter|gradient|activation) .*/", r"\1 NAME/", name))

    def add_text(self, name: str, *given: Any) -> None:
        self.names.add(f"{name} (text)")

    def close(self) -> None:
        pass


def logs() -> Part:
    """Keys of log lines, of the metrics file, of curves, and of the pages for who supervises a run."""
    package, stub = types.ModuleType("tensorboard"), types.ModuleType("torch.utils.tensorboard")
    package.__spec__, stub.SummaryWriter = importlib.machinery.ModuleSpec("tensorboard", None), Curves
    stubs = {"tensorboard": package, "torch.utils.tensorboard": stub}
    lines: set[str] = set()
    metrics: set[str] = set()
    with tempfile.TemporaryDirectory() as made, mock.patch.dict(sys.modules, stubs):
        write_inputs(Path(made))
        for kind in SCRIPTS:
            folder, more = Path(made) / kind, RUNS[kind][1].format(tmp=made)
            pages = f"--metrics-file {folder}.jsonl --heartbeat-file {folder}.json --prometheus-file {folder}.prom"
            said = run(f"{more} {LOGGED} {pages} --tensorboard-dir {folder} --save {folder}", kind)
            lines |= {f"{kind}: {key}" for key in keys_of_lines(said)}
            records = map(json.loads, Path(f"{folder}.jsonl").read_text().splitlines())
            metrics |= {f"{kind}: {record['kind']}: {key}" for record in records for key in record}
        heartbeat = set(paths_of(json.loads(Path(f"{made}/gpt.json").read_text())))
        prometheus = set(re.findall(r"^(?:# TYPE )?(\w+)", Path(f"{made}/gpt.prom").read_text(), re.MULTILINE))
        progress = re.sub(r"\d+", "N", (Path(made) / "gpt/progress.txt").read_text()).splitlines()
        progress = {re.sub(re.escape(made), "FOLDER", line).partition("\t")[2] for line in progress}
        # An output that is lost.
        pages = f"--metrics-file /dev/full --heartbeat-file {made}/lost.json --prometheus-file {made}/lost.prom"
        with contextlib.redirect_stderr(io.StringIO()):
            run(f"{TINY} {pages} --tensorboard-dir {made}/lost --train-iters 3")
        heartbeat |= set(paths_of(json.loads(Path(f"{made}/lost.json").read_text())))
        prometheus |= set(re.findall(r"^(?:# TYPE )?(\w+)", Path(f"{made}/lost.prom").read_text(), re.MULTILINE))
        error = Path(made) / "error.json"
        with mock.patch.dict(os.environ, {"TORCHELASTIC_ERROR_FILE": str(error)}):
            product("error file")("text")
        errors = sorted(paths_of(json.loads(error.read_text())))
    return {
        "log lines": sorted(lines),
        "--metrics-file": sorted(metrics),
        "curves": sorted(Curves.names),
        "--heartbeat-file": sorted(heartbeat),
        "--prometheus-file": sorted(prometheus),
        "progress.txt": sorted(progress),
        "error file of torchrun": errors,
    }


def keys_of_lines(printed: str) -> Iterator[str]:
    """The keys of lines such as ` [date] iteration 1/ 2 | lm loss: 3.4 |` and ` validation loss at iteration 1 | ...`."""
    for line in printed.splitlines():
        if line.count(" | ") > 1:
            for part in re.sub(r"^ \[.*?\] ", "", line).strip(" |").split(" | "):
                yield re.sub(r"\s*\d+(/\s*\d+)?", " N", part.partition(":")[0]).strip()
        elif timer := re.match(r"^ {4}([\w-]+) \.+: ", line):
            yield f"timer {timer[1]}"


# ---------------------------------------------------------------- communication


def ledger() -> Part:
    """The operations over each axis that small runs record, and the names of all axes."""
    from layouts import Layout
    from tiny_run import TINY_GPT2, TINY_LLAMA, run
    from tiny_t5 import CONFIGS, T5

    def zero(stage: int, instances: int = 1, **more: Any) -> Layout:
        layout = Layout(dp=2 * instances, **more)
        parts = {"zero_stage": stage, "num_distributed_optimizer_instances": instances}
        return replace(layout, data_parallel=replace(layout.data_parallel, **parts))

    def shared(method: str) -> Layout:
        heads = 2 if "+" in method else 1
        return Layout(cp=2 * heads, cp_heads=heads, cp_types=(method,))

    cases = {
        "tp": (TINY_GPT2, Layout(tp=2)),
        "tp with sequence parallelism": (TINY_GPT2, Layout(tp=2, sp=True)),
        "tp that shares heads": (TINY_LLAMA, Layout(tp=4, sp=True)),
        "pp": (TINY_GPT2, Layout(pp=2, m=2)),
        "pp with chunks": (TINY_LLAMA, Layout(pp=2, m=2, v=2, schedule="interleaved")),
        **{f"cp {name}": (TINY_LLAMA, shared(name)) for name in product("METHODS")},
        **{f"ZeRO {stage}": (TINY_LLAMA, zero(stage)) for stage in range(4)},
        "ZeRO 1 in groups": (TINY_LLAMA, zero(1, 2)),
        "ZeRO 3 in groups": (TINY_LLAMA, zero(3, 2)),
    }
    groups: Part = {"ledger: axes": of_one_rank(list)}
    for name, (config, layout) in cases.items():
        groups[f"ledger: {name}"] = calls_of(run(config, layout, steps=1, global_batch=4 * layout.dp))
    outcome = run(CONFIGS["t5"], Layout(pp=2, m=2, split=1), steps=1, global_batch=4, subject=T5)
    return groups | {"ledger: T5 over stages": calls_of(outcome)}


def calls_of(outcome: Any) -> Group:
    return sorted({f"{op} over {axis}" for _, calls in outcome.calls for op, axis, _ in calls})


# ---------------------------------------------------------------- flags


def flags() -> Part:
    """Every flag of the scripts that train and of the tools, with its other spellings, choices and default.

    Of a script that takes the flags of pretrain_gpt.py those that differ from there."""
    groups: Part = {}
    first: set[str] = set()
    tools = sorted(path for path in (ROOT / "tools").glob("*.py") if 'if __name__ == "__main__"' in path.read_text())
    for path in [*(ROOT / name for name in SCRIPTS.values()), *tools]:
        found = {entry for parser in parsers_of(path) for entry in entries_of(parser)}
        assert found, f"{path.name} has made no parser"
        trains = len(found & first) > len(first) / 2
        missing = {f"without {entry}" for entry in first - found}
        groups[f"flags: {path.name}"] = sorted((found - first) | missing if trains else found)
        first = first or found
    for label in (label for label in PRODUCT if label.startswith("other flags ")):
        known = product(label)
        groups[label] = [" ".join([name, *(f"harmless {value}" for value in known[name].harmless)]) for name in known]
    groups["shorthand flags"] = [
        f"{flag}: {name} = {value!r}"
        for flag, given in product("shorthand flags").items()
        for name, value in given.items()
    ]
    return groups


def parsers_of(path: Path) -> list[argparse.ArgumentParser]:
    """The parsers that a script makes when it is asked for help."""
    made: dict[int, argparse.ArgumentParser] = {}
    parse = argparse.ArgumentParser.parse_known_args

    def noting(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        made[id(parser)] = parser
        return parse(parser, *given, **named)

    before = list(sys.path)
    with contextlib.ExitStack() as inside:
        inside.enter_context(contextlib.suppress(SystemExit))
        inside.enter_context(contextlib.redirect_stdout(io.StringIO()))
        inside.enter_context(mock.patch.object(argparse.ArgumentParser, "parse_known_args", noting))
        inside.enter_context(mock.patch.object(sys, "argv", [str(path), "--help"]))
        runpy.run_path(str(path), run_name="__main__")
    sys.path[:] = before
    return list(made.values())


def entries_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        field = getattr(action, KNOB, None)
        default = (
            action.default
            if field is None
            else field.default_factory()
            if field.default is dataclasses.MISSING
            else field.default
        )
        words = [" ".join(action.option_strings) or action.dest]
        choices = action.metavar if str(action.metavar).startswith("{") else action.choices
        if choices is not None:
            words.append(choices if isinstance(choices, str) else f"{{{','.join(sorted(map(str, choices)))}}}")
        if action.nargs is not None:
            words.append(f"values {action.nargs}")
        if default not in (None, argparse.SUPPRESS):
            words.append(f"= {shown(default)}")
        yield " ".join(words)


# ---------------------------------------------------------------- records of tools


def records() -> Part:
    """Keys of what tools write as JSON: a benchmark, and an estimate of memory."""
    small = "--seq-length 16 --micro-batch-size 1 --rounds 1 --warmup 1 --steps 1 --peers none --no-ceilings --profile"
    printed, unseen = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as made, contextlib.redirect_stdout(unseen):
        written = Path(made) / "benchmark.json"
        failed = product("benchmark")(shlex.split(f"--model tiny {small} --device cpu --json {written}"))
        assert not failed, unseen.getvalue()
        benchmark = json.loads(written.read_text())
        with contextlib.redirect_stdout(printed):
            product("estimate")(shlex.split(f"{SIZES} --vocab-size 61 --json"))
    about = {"benchmark": benchmark, "estimate of memory": json.loads(printed.getvalue())}
    return {f"keys of a record: {name}": sorted(set(paths_of(found))) for name, found in about.items()}


# ---------------------------------------------------------------- lists

QUICK = (parameters, parameters_of_megatrons_classes, sites_in_text, settings, tables, formats, hashes)
WHOLE = (seeds, manifests, logs, ledger, flags, records)


def collected(parts: Iterable[Callable[[], Part]]) -> dict[str, Part]:
    return {name_of(part): part() for part in parts}


def name_of(part: Callable[[], Part]) -> str:
    return part.__name__.replace("_", " ")


def quick() -> dict[str, Part]:
    """The parts that take no run."""
    return collected(QUICK)


def whole() -> dict[str, Part]:
    """The other parts, in a process of their own: runs leave something behind."""
    done = subprocess.run([sys.executable, __file__, "whole"], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def differences(before: dict[str, Part], now: dict[str, Part]) -> dict[str, Part]:
    """{"lost" or "added": {group: names}}. Only parts that `now` has are compared."""
    found: dict[str, Part] = {"lost": {}, "added": {}}
    for part, groups in now.items():
        saved = before.get(part, {})
        for group in dict.fromkeys([*saved, *groups]):
            was, names = saved.get(group, []), groups.get(group, [])
            for kind, some in (("lost", set(was) - set(names)), ("added", set(names) - set(was))):
                if some:
                    found[kind][group] = sorted(some)
    return found


def report(found: dict[str, Part]) -> str:
    """What differs, and what to do about it; nothing if nothing differs."""
    lines = [
        f"{group}: {kind} {name}" for kind, groups in found.items() for group, names in groups.items() for name in names
    ]
    if found["lost"]:
        lines.append(
            "A name that is lost or renamed breaks what has it: checkpoints no longer resume, caches are built again, "
            "numbers change with their seeds, scripts and readers of logs fail. Give the name back."
        )
    if found["added"]:
        lines.append(
            "A name is added by writing the list again: python tests/campaigns/frozen_names.py > tests/campaigns/frozen_names.json"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    if sys.argv[1:] == ["whole"]:
        with contextlib.redirect_stdout(sys.stderr):  # runs print, too
            found = collected(WHOLE)
        print(json.dumps(found))
    else:
        print(json.dumps(quick() | whole(), indent=1))
