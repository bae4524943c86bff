"""An attribute whose name stands in text is one that a rename misses: `getattr(x, "slot", None)` then gives None, without an error.

So nothing of ours is called by its name in text, an attribute of ours that an object may lack is read so in one function, and
everything else that is read so has the name that somebody else gave it.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from code_lines import nodes, product_files, tree

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.param_grad_state import GradReduceInterface, ParamGradSink
from megatron.core.distributed.zero_stage_strategies import GradReduce
from megatron.core.offload.activation_offload import HoldsActivations
from megatron.core.ops.main_grad_interface import DataParallelChunkInterface, GradSink
from megatron.core.tensor_parallel.broadcast_batch_over_tp import GeneratedBatch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training.memory.dry_run_of_one_rank import AnyBatch

ROOT = Path(__file__).parents[3]

# Attributes of ours that an object may lack, and the one function that reads each. Scripts set those with a note too.
OURS = {
    "megatron/core/transformer/layer_parallel_context.py check_attends_over_whole_samples": "attends_over_whole_samples",  # a script's
    "megatron/core/tensor_parallel/exchange_parallel_linears_for_adapters.py _check_parts_are_declared": "sequence_parallel",  # a script's
    "megatron/core/transformer/transformer_layer.py _recompute_module_of": "recompute_module",  # a script's MLP
    "megatron/core/ops/aux_loss_collector.py own_aux_losses": "aux_losses",  # a script's model or layer
    "megatron/core/ops/aux_loss_collector.py adds_terms_to_graph": "adds_terms_to_graph",  # a script's model
    "megatron/core/ops/compile/compiled_region.py _whole_of": "compiled_layer",
    "megatron/core/base/dataclass_flags.py field_of_action": "config_field",
    "megatron/porting/judge_fork_names_and_flags.py _further_arguments": "__defaults_only__",  # of a function, set by its decorator
    "megatron/core/datasets/token_ids_without_embedding_row.py embedding_rows_problem": "added_tokens",
    "megatron/core/datasets/pad_token_is_text.py pad_is_text": "pad_is_text",  # a script's tokenizer may say it
    "megatron/core/distributed/zero_init.py shard_of": "shard",
    "megatron/core/distributed/param_grad_state.py place_in_bucket": "in_bucket",
    "megatron/core/distributed/param_grad_state.py is_tied": "is_tied",  # a script's model
    "megatron/core/distributed/param_grad_state.py declared_num_grads": "num_grads_per_backward",  # a script's model
    "megatron/core/ops/recomputable_tensors.py _mark_of": "recompute_recipe",
    "megatron/core/ops/recomputable_tensors.py producer_of": "requests",
    "megatron/core/ops/main_grad_interface.py main_grad_of": "main_grad",  # Megatron's name
    "megatron/core/ops/main_grad_interface.py grad_sink_of": "grad_sink",
    "megatron/core/base/registry_with_checked_entries.py function_of": "computes",  # a script's entry of a table
    "megatron/core/sharding/buffer_placement_and_sync.py persistent_buffers": "buffer_placements",  # a script's module
    "megatron/core/sharding/placement.py placement_of": "placement",  # a script's layer
    "megatron/core/ops/layout_invariant_dropout.py own_dropout_keys": "keys",  # a script's layer
    "megatron/core/tensor_parallel/cross_entropy.py plain_cross_entropy_of": "cross_entropy",
    "megatron/core/tensor_parallel/exchange_parallel_linears_for_adapters.py modules_of_linear": "kept_of_linear",
    "megatron/core/tokenizers/tokenizer_sha256.py tokenizer_sha256": "hashed_changes",
    "megatron/core/transformer/compile_before_and_after_attention.py _may_be_left_out": "may_be_left_out",
    "megatron/training/make_chunks_optimizer_and_pipeline.py _is_shared": "shared_embedding",  # Megatron's name
    "megatron/training/monitor/tensor_statistics.py _gives_hidden_states": "gives_hidden_states",  # a script's layer
    "tools/preprocessing/word_memory.py packer": "word_pattern",
}
# Those that are set in the file of their reader alone, on whatever object.
KEPT_IN_ONE_FILE = ("config_field", "recompute_recipe", "shard", "grad_sink", "kept_of_linear")

# What other projects, Python, or scripts have named: whose it is -> file -> names.
FOREIGN = {
    "Python's and the system's, which differ between versions": {
        "megatron/core/dist_checkpointing/async_snapshot_to_writer_process.py": "MAP_POPULATE memfd_create",
        "megatron/core/parallel/accelerator.py": "gnu_get_libc_version",
        "megatron/core/parallel/detect_lost_ranks_by_tcp.py": "register_at_fork",
        "megatron/core/parallel/init_and_destroy_distributed.py": "last_type",
        "megatron/core/storage/fsspec_object_store.py": "EREMOTEIO",
        "megatron/core/base/rank_status.py": "posix_fallocate",
        "megatron/report.py": "sched_getaffinity",
        "megatron/training/fault_tolerance/exit_with_launcher.py": "pidfd_open",
        "megatron/training/initialize.py": "sched_getaffinity",
        "tools/benchmarking/contest.py": "sched_getaffinity",
    },
    "Python's, on any object": {
        "megatron/core/transformer/transformer_config.py": "__name__",
        "megatron/core/base/dataclass_flags.py": "__metadata__",
        "megatron/core/distributed/released_params_and_grads_guards.py": "__name__ __self__",
        "megatron/core/sharding/initial_values.py": "__name__",
        "megatron/training/memory/meta_tensor_mode_and_fake_group.py": "__module__",
        "megatron/training/memory/oom_advice.py": "__notes__",
    },
    "of an error of any kind, which a store's library raises": {
        "megatron/core/storage/fsspec_object_store.py": "errno strerror"
    },
    "torch's, which differ between versions": {
        "megatron/core/parallel/collectives.py": "all_gather_single reduce_scatter_single",
        "megatron/core/parallel/accelerator.py": "memory _record_memory_history",
        "megatron/deepspeed/comm.py": "all_gather_single reduce_scatter_single",
        # the names that it replaces
        "megatron/porting/map_cuda_to_cpu.py": "DeviceMesh ProcessGroupNCCL StreamContext _dump_snapshot _record_memory_history "
        "custom_bwd custom_fwd device device_of init init_device_mesh mark range_end range_pop range_push range_start "
        "start stop stream",
    },
    "a scheduler's, of torch or a script: else it is a function that makes one": {
        "megatron/deepspeed/engine.py": "step"
    },
    "DeepSpeed's, of a script's arguments": {"megatron/deepspeed/engine.py": "deepspeed_config"},
    "Megatron's, of a script's arguments or config, of any of its releases": {
        "megatron/core/transformer/transformer_layer.py": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout",
        "megatron/core/transformer/module.py": "sequence_parallel",
        "megatron/core/ops/aux_loss_collector.py": "config num_moe_experts",
        "megatron/core/pipeline_parallel/schedules.py": "config params_dtype pipeline_dtype residual_dtype sequence_parallel",
        "megatron/core/tensor_parallel/linear_layers.py": "params_dtype sequence_parallel",
        "megatron/training/arguments/transformer_config_from_args.py": "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "norm_epsilon num_experts",
        "megatron/core/transformer/transformer_config.py": "name",
        "megatron/core/transformer/dot_product_attention.py": "window_size",
    },
    "Megatron's, of a spec or a class in its place": {
        "megatron/core/transformer/spec_utils.py": "module params submodules",
        "megatron/core/transformer/transformer_block.py": "submodules",
    },
    "Megatron's, of a script's model": {
        "megatron/core/transformer/module.py": "post_process",
        "megatron/core/utils.py": "module",
    },
    "ours, which scripts' classes alone have": {
        "megatron/training/checkpointing/model_class_and_custom_modules.py": "model_name"
    },
    "Megatron's, of a data set": {"megatron/core/datasets/blended_dataset.py": "dataset_path"},
    "Megatron's, which a script sets on parameters": {
        "megatron/training/make_chunks_optimizer_and_pipeline.py": "sequence_parallel"
    },
    "Megatron's, of a tokenizer, which may be a script's": {
        "megatron/core/datasets/bert_dataset_builder.py": "name",
        "megatron/core/datasets/fill_in_the_middle.py": "vocab",
        "megatron/core/datasets/token_ids_without_embedding_row.py": "additional_special_tokens_ids inv_vocab name path",
        "megatron/core/datasets/t5_dataset_builder.py": "additional_special_tokens_ids name",
        "megatron/core/tokenizers/tokenizer_sha256.py": "eod pad",
        "megatron/core/tokenizers/vocabulary_changes_and_embedding_rows.py": "vocab",
        "megatron/evaluation/tokenize_and_window_requests.py": "bos inv_vocab tokenize_sentences",
        "tools/evaluating/lm_eval_adapter.py": "path",
        "tools/generating/t5.py": "additional_special_tokens_ids bos eos",
        "tools/preprocessing/word_memory.py": "tokenize_batch tokenize_sentences",
    },
}

_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
_BY_NAME |= {"attrgetter", "methodcaller", "__getattribute__", "__setattr__", "__delattr__"}


class Named(NamedTuple):
    path: str
    function: str  # "": outside
    name: str


def named_in(text: str, path: str = "") -> Iterator[Named]:
    """Attributes whose names stand in text, in a call, or in the tuple that a loop around a call runs over, if the call bears that
    an object lacks one."""
    yield from _named(tree(text), path, "", {})


def _named(node: ast.AST, path: str, function: str, loops: dict[str, list[str]]) -> Iterator[Named]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    for loop in (node, *getattr(node, "generators", ())):
        if isinstance(loop, ast.For | ast.comprehension) and isinstance(loop.target, ast.Name):
            texts = [one.value for one in getattr(loop.iter, "elts", ()) if isinstance(one, ast.Constant)]
            loops = loops | {loop.target.id: [text for text in texts if isinstance(text, str)]}
    if isinstance(node, ast.Call) and (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) in _BY_NAME:
        raises = getattr(node.func, "id", None) == "getattr" and len(node.args) == 2
        for argument in node.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Named(path, function, argument.value)
            elif isinstance(argument, ast.Name) and not raises:
                yield from (Named(path, function, name) for name in loops.get(argument.id, ()))
    for child in ast.iter_child_nodes(node):
        yield from _named(child, path, function, loops)


@cache
def product() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in product_files()}


@cache
def found() -> frozenset[Named]:
    return frozenset(chain.from_iterable(named_in(text, path) for path, text in product().items()))


def foreign() -> set[tuple[str, str]]:
    return {(path, name) for files in FOREIGN.values() for path, names in files.items() for name in names.split()}


def readers() -> set[Named]:
    return {Named(*place.split(), name) for place, name in OURS.items()}


# ---------------------------------------------------------------- the tables


def test_an_attribute_is_named_in_text_where_its_name_is_somebody_elses_or_in_its_reader():
    others = {one for one in found() - readers() if (one.path, one.name) not in foreign()}
    assert not others, "write x.name, or isinstance of a class that declares it; else add it to OURS or FOREIGN"


def test_the_tables_have_no_row_too_many():
    assert readers() <= found()
    assert foreign() <= {(one.path, one.name) for one in found()}


def test_ours_has_one_reader_for_each_name():
    assert len(set(OURS.values())) == len(OURS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f(x):\n    return getattr(x, 'grad_sink', None)", "grad_sink"),
        ("def f(x):\n    return [hasattr(x, n) for n in ('grad_sink', 'grad')][0]", "grad_sink"),
        ("def f(x):\n    for n in ['grad_sink']:\n        setattr(x, n, 1)", "grad_sink"),
        ("def f(x):\n    object.__setattr__(x, 'grad_sink', 1)", "grad_sink"),
        ("def f(x):\n    operator.methodcaller('reserve', 1)(x)", "reserve"),
        ("def f(x):\n    return [getattr(x, n) for n in ('grad_sink', 'grad')]", None),  # which raises
        ("def f(x):\n    return x.grad_sink", None),
        ("def f(x, n):\n    return getattr(x, n)", None),
    ],
)
def test_a_name_in_text_is_seen(text: str, name: str | None):
    seen = list(named_in(text))
    assert Named("", "f", name) in seen if name else not seen


# ---------------------------------------------------------------- what is read is there


@cache
def set_by_us() -> dict[str, set[str]]:
    """Attribute -> the files in which an object gets it, or a class has it."""
    result: dict[str, set[str]] = {}
    for path, text in product().items():
        for node in nodes(text):
            for name in _names_set_by(node):
                result.setdefault(name, set()).add(path)
    return result


def _names_set_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    if isinstance(node, ast.ClassDef) and not is_protocol(node):
        for line in node.body:
            if isinstance(line, ast.FunctionDef):
                yield line.name
            elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id
            elif isinstance(line, ast.Assign):
                yield from (target.id for target in line.targets if isinstance(target, ast.Name))


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


@pytest.mark.parametrize("name", OURS.values())
def test_what_is_read_is_set_under_the_same_name(name: str):
    assert name in set_by_us(), f"nothing sets {name}: its reader finds it never"


@pytest.mark.parametrize("name", KEPT_IN_ONE_FILE)
def test_what_is_read_in_one_file_is_set_there(name: str):
    (place,) = (place for place, read in OURS.items() if read == name)
    on_others = {
        path
        for path, text in product().items()
        for node in nodes(text)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert on_others == {place.split()[0]}


def test_what_a_runtime_protocol_asks_for_is_what_our_classes_have():
    """A class of ours whose method has another name would be taken for one without it."""
    asked = {
        f"{node.name}.{member.name}": member.name
        for text in product().values()
        for node in nodes(text)
        if isinstance(node, ast.ClassDef) and is_protocol(node) and _is_asked_at_runtime(node)
        for member in node.body
        if isinstance(member, ast.FunctionDef)
    }
    assert set(asked) >= {"DeclaresBoundary.boundary", "TakesInputTensor.set_input_tensor", "HoldsTensors.tensors"}
    assert not [said for said, name in asked.items() if name not in set_by_us()]


def _is_asked_at_runtime(node: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "runtime_checkable" for one in node.decorator_list)


@pytest.mark.parametrize(
    ("base", "ours"),
    [
        (DataParallelChunkInterface, DistributedDataParallel),
        (HoldsActivations, TransformerBlock),
        (GeneratedBatch, AnyBatch),
        (GradSink, ParamGradSink),
        (GradReduceInterface, GradReduce),
    ],
)
def test_our_class_has_the_methods_that_its_base_declares(base: type, ours: type):
    declared = {name for name, value in vars(base).items() if callable(value) and not name.startswith("_")}
    assert issubclass(ours, base) and declared <= set(vars(ours))
