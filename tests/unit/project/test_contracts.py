"""No name imports with another contract than its namesake in Megatron: arguments by name, place and default.

`tests/megatron_facts.json` has the arguments of each name in Megatron's releases; `tests/campaigns/megatron_facts.py` has written it from a
clone. A call that is valid there must mean the same here, or, where a feature is missing or releases contradict each other, fail.
So arguments are given by place as far as the releases agree on the places; behind that an argument may be given by name alone.
"""

import dataclasses
import enum
import importlib
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.core.base.unsupported_arguments import accepts_defaults_only

FACTS = json.loads(Path(__file__).parents[2].joinpath("megatron_facts.json").read_text())
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
MANY = 12  # fields of a dataclass that nobody gives by their places
ORDERS = "releases have different orders or defaults"
# Name -> arguments in which releases contradict each other, or that stay as they are -> why.
DIFFERENT = {
    "BertModel": dict.fromkeys(
        ["num_tokentypes", "add_binary_head", "parallel_output", "pre_process", "post_process"],
        "a config is first since core 0.5; a number in its place fails",
    ),
    "ColumnParallelLinear": {"gather_output": "None is the release's own: True without a config, False with one"},
    "RowParallelLinear": {"input_is_parallel": "None is False, but for `init`, which is ours"},
    "VocabParallelEmbedding": {"reduce_scatter_embeddings": "None is False, but for `init`, which is ours"},
    "DistributedDataParallel": dict.fromkeys(
        [
            "module",
            "data_parallel_group",
            "accumulate_allreduce_grads_in_fp32",
            "overlap_grad_reduce",
            "use_distributed_optimizer",
            "bucket_size",
            "ddp_config",
        ],
        "core 0.6 put all settings into a ddp_config; the arguments of core 0.5 fail",
    ),
    "FusedLayerNorm": dict.fromkeys(
        ["zero_centered_gamma", "normalization"], f"{ORDERS}: another value than False in these places fails"
    ),
    "GPTModel": dict.fromkeys(
        ["num_tokentypes", "parallel_output", "pre_process", "post_process"],
        "a config is first since core 0.5; a number in its place fails",
    ),
    "IndexedDataset": {"s3_config": f"{ORDERS}: any value fails"},
    "MLPSubmodules": dict.fromkeys(("activation_func", "linear_fc2"), f"{ORDERS}: an own activation function fails"),
    **dict.fromkeys(
        ("ModelParallelConfig", "TransformerConfig"),
        dict.fromkeys(
            [
                "tp_comm_atomic_ag",
                "tp_comm_atomic_rs",
                "async_tensor_model_parallel_allreduce",
                "cpu_offloading_weights",
                "distribute_saved_activations",
                "mtp_loss_scaling_factor",
            ],
            ORDERS,
        ),
    ),
    "PackedSeqParams": dict.fromkeys(["max_seqlen_q", "max_seqlen_kv"], f"{ORDERS}: every layer refuses the object"),
    **dict.fromkeys(
        ("GPTDataset", "MockGPTDataset", "BERTMaskedWordPieceDataset"),
        dict.fromkeys(
            [
                "dataset",
                "indexed_dataset",
                "dataset_path",
                "indices",
                "indexed_indices",
                "num_samples",
                "index_split",
                "config",
            ],
            "names a kind to the builder; a constructor is not built yet, and fails",
        ),
    ),
    **dict.fromkeys(
        ("GPTDatasetConfig", "BERTMaskedWordPieceDatasetConfig"),
        dict.fromkeys(
            [
                "masking_probability",
                "short_sequence_probability",
                "masking_max_ngram",
                "masking_do_full_word",
                "masking_do_permutation",
                "masking_use_longer_ngrams",
                "masking_use_geometric_distribution",
                "classification_head",
                "reset_position_ids",
                "reset_attention_mask",
                "eod_mask_loss",
                "vocab_size",
            ],
            "None is an error there; core 0.5's vocab_size alone is a number",
        ),
    ),
    "BERTMaskedWordPieceDataset": dict.fromkeys(
        ["indexed_dataset", "dataset_path", "indexed_indices", "num_samples", "index_split", "config"],
        "names a kind to the builder; its constructor fails",
    ),
    "MegatronOptimizer": dict.fromkeys(
        ["optimizer", "config", "init_state_fn", "chunks", "group_of"], "is made by get_megatron_optimizer alone"
    ),
    "get_megatron_optimizer": dict.fromkeys(
        ["config_overrides", "use_gloo_process_groups", "pg_collection", "dump_param_to_param_group_map"],
        f"{ORDERS}: as in core 0.12",
    ),
    "load": {"strict": "None is ASSUME_OK_UNEXPECTED"},
    "parse_args": {"defaults": "Megatron 2's: a dictionary in this place fails"},
    "setup_model_and_optimizer": {"checkpointing_context": f"{ORDERS}: another value than None fails"},
    "unwrap_model": {"module_instances": "None is every wrapper"},
    "DistributedDataParallelConfig": {"keep_fp8_transpose_cache_when_using_custom_fsdp": "core 0.12's alone"},
    "checkpoint": {
        "distribute_saved_activations": "Megatron 2 had none: a tensor in its place is the function's first"
    },
    "get_ltor_masks_and_position_ids": dict.fromkeys(
        ["pad_token", "reset_position_ids", "reset_attention_mask", "pad_mask_loss"],
        "core 0.16 put two arguments between, without defaults: its calls fail",
    ),
    "initialize_model_parallel": {
        "pipeline_model_parallel_comm_backend": f"{ORDERS}: a name in this place fails",
        **dict.fromkeys(
            ["tensor_model_parallel_size_", "pipeline_model_parallel_size_", "virtual_pipeline_model_parallel_size_"],
            "Megatron 2's spelling, which fails by name",
        ),
    },
    "is_pipeline_first_stage": {"ignore_virtual": f"{ORDERS}: as up to core 0.12"},
    "is_pipeline_last_stage": {"ignore_virtual": f"{ORDERS}: as up to core 0.12"},
    "is_rank_in_embedding_group": {"ignore_virtual": f"{ORDERS}: as since core 0.15"},
    "pretrain": dict.fromkeys(
        ["forward_step_func", "extra_args_provider", "args_defaults", "model_type"],
        "Megatron 2's order, which is recognised by the types",
    ),
    **dict.fromkeys(
        (
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_with_interleaving",
            "forward_backward_pipelining_without_interleaving",
        ),
        dict.fromkeys(("seq_length", "micro_batch_size"), "since core 0.3; 23.04's tensor_shape fails"),
    ),
}


def is_same(text: str, value: Any) -> bool:
    """Whether a default, as Megatron's source says it, is ours."""
    try:
        said = eval(text, {"sys": __import__("sys")})  # numbers, such as 1024 * 1024
    except Exception:  # a name of a module there
        last = text.split("(")[0].split(".")[-1]
        return last in (getattr(value, "name", None), getattr(value, "__name__", None), str(value).split(".")[-1])
    return said is ... or said == value or (said in ([], {}) and not value)


@cache
def agreed_places() -> dict[tuple[str, str], int]:
    """(module, name) -> how many first places have the same names in all releases, under all names of that object of ours."""
    objects = {(module, name): getattr(importlib.import_module(module), name) for module, name, _ in FACTS}
    known = defaultdict(list)
    for module, name, facts in FACTS:
        known[id(objects[module, name])] += [arguments for arguments, _ in facts]
    return {name: agreed(known[id(ours)]) for name, ours in objects.items()}


def agreed(some: list[list[str]]) -> int:
    longest = max(map(len, some))
    at = ({one[place].partition("=")[0] for one in some if place < len(one)} for place in range(longest))
    return next((place for place, names in enumerate(at) if len(names) > 1), longest)


def problems(theirs: list[str], ours: Any, agreed: int) -> Iterator[tuple[str, str]]:
    """(argument, what is wrong with it). agreed: the places that mean the same in all releases."""
    if isinstance(ours, type) and issubclass(ours, enum.Enum):
        yield from ((one, "is no member") for one in theirs if one not in ours.__members__)
        return
    mine = inspect.signature(ours).parameters
    places = [name for name, one in mine.items() if one.kind is POSITIONAL]
    kinds = {one.kind for one in mine.values()}
    by_name, by_place = inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds
    if dataclasses.is_dataclass(ours) and len(theirs) > MANY:
        places = [one.split("=")[0] for one in theirs]
    known, star = set(), False
    for place, one in enumerate(theirs):
        name, _, default = one.partition("=")
        star |= name.startswith("*")
        known.add(name)
        if name.startswith(("*", "_")):
            continue
        if name not in mine:
            if not by_name:
                yield name, "is missing"
            elif not star and place < len(places):
                yield name, f"has the place of {places[place]}"
            elif not star and place < agreed and not by_place:
                yield name, "cannot be given by its place"
        elif not star and place < len(places) and places[place] != name:
            yield name, f"has the place of {places[place]}"
        elif not star and len(places) <= place < agreed and mine[name].kind is KEYWORD and not by_place:
            yield name, "cannot be given by its place"
        elif default and mine[name].default is inspect.Parameter.empty:
            yield name, "must be given"
        elif default and not is_same(default, mine[name].default):
            yield name, f"is {mine[name].default!r} by default, not {default}"
    for name, one in mine.items():
        if name not in known and one.kind in (POSITIONAL, KEYWORD) and one.default is inspect.Parameter.empty:
            yield name, "must be given, and Megatron has none"


@pytest.mark.parametrize("module, name, facts", FACTS, ids=[f"{module}.{name}" for module, name, _ in FACTS])
def test_a_name_has_the_contract_of_its_namesake(module: str, name: str, facts: list[Any]):
    ours = getattr(importlib.import_module(module), name)
    places = agreed_places()[module, name]
    found = [(*problem, releases) for theirs, releases in facts for problem in problems(theirs, ours, places)]
    allowed = DIFFERENT.get(name, {})
    assert not [f"{one} {what} ({', '.join(of)})" for one, what, of in found if one not in allowed]


def test_places_agree_up_to_the_first_that_releases_name_differently():
    assert agreed([["a", "b=1", "c"], ["a", "b=2"], ["a", "b", "d"]]) == 2
    assert agreed([["a"], ["a", "b"]]) == 2


def test_an_argument_that_has_a_place_in_all_releases_is_not_for_names_alone():
    theirs = ["a", "b=1", "c=2"]
    places = {"cannot be given by its place"}
    assert {what for _, what in problems(theirs, lambda a, *, b=1, c=2: None, 3)} == places
    assert {what for _, what in problems(theirs, lambda a, **others: None, 3)} == places
    assert not [*problems(theirs, lambda a, b=1, *, c=2: None, 2)]


def test_an_argument_without_use_has_megatrons_place_and_default():
    @accepts_defaults_only("a", b=None)
    @accepts_defaults_only(d=False)
    def function(a: int, c: int = 3, *, own: int = 5) -> tuple[int, int, int]:
        return a, c, own

    assert [*inspect.signature(function).parameters] == ["a", "b", "c", "d", "own"]
    assert function(1) == (1, 3, 5) and function(1, None, 2, False, own=4) == (1, 2, 4)
    for given in ((1, 2), (1, None, 2, True)):
        with pytest.raises(NotImplementedError, match="is not built"):
            function(*given)
