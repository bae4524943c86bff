"""The names that research forks of Megatron import are where they look for them, and answer as Megatron does."""

import importlib
import types

import pytest
import torch
from said import raises_telling

from megatron.core import mpu, parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import global_state, initialize_model_parallel
from megatron.core.parallel.initialize_model_parallel import stage_ranks
from megatron.core.parallel.mesh import build_mesh
from megatron.core.parallel.rank_grid import AxisSizes

NAMES = {
    "megatron": "get_args get_tokenizer is_last_rank mpu print_rank_0 print_rank_last",
    "megatron.core": "ModelParallelConfig mpu parallel_state tensor_parallel",
    "megatron.core.enums": "ModelType",
    "megatron.core.utils": "divide ensure_divisibility get_attr_wrapped_model get_model_config init_method_normal "
    "scaled_init_method_normal unwrap_model",
    "megatron.core.parallel_state": "initialize_model_parallel destroy_model_parallel model_parallel_is_initialized is_initialized "
    "is_unitialized get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size "
    "get_tensor_model_parallel_src_rank get_pipeline_model_parallel_group get_pipeline_model_parallel_rank "
    "get_pipeline_model_parallel_world_size get_pipeline_model_parallel_first_rank get_pipeline_model_parallel_last_rank "
    "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank get_virtual_pipeline_model_parallel_rank "
    "set_virtual_pipeline_model_parallel_rank get_virtual_pipeline_model_parallel_world_size is_pipeline_first_stage "
    "is_pipeline_last_stage get_data_parallel_group get_data_parallel_group_gloo get_data_parallel_rank "
    "get_data_parallel_world_size get_data_parallel_src_rank get_context_parallel_group get_context_parallel_rank "
    "get_context_parallel_world_size get_context_parallel_global_ranks get_expert_model_parallel_group "
    "get_expert_model_parallel_rank get_expert_model_parallel_world_size get_expert_tensor_parallel_group "
    "get_expert_tensor_parallel_rank get_expert_tensor_parallel_world_size get_expert_data_parallel_group "
    "get_expert_data_parallel_rank get_expert_data_parallel_world_size get_model_parallel_group get_model_parallel_src_rank "
    "get_embedding_group is_rank_in_embedding_group get_position_embedding_group is_rank_in_position_embedding_group "
    "get_global_memory_buffer set_tensor_model_parallel_rank set_tensor_model_parallel_world_size "
    "set_pipeline_model_parallel_rank set_pipeline_model_parallel_world_size get_tensor_and_data_parallel_group "
    "set_virtual_pipeline_model_parallel_world_size set_data_parallel_rank set_expert_model_parallel_rank "
    "set_expert_model_parallel_world_size",
    "megatron.core.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding vocab_parallel_cross_entropy "
    "broadcast_data copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
    "scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region "
    "gather_from_sequence_parallel_region reduce_scatter_to_sequence_parallel_region get_cuda_rng_tracker checkpoint "
    "model_parallel_cuda_manual_seed split_tensor_along_last_dim",
    "megatron.core.tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "megatron.core.tensor_parallel.cross_entropy": "vocab_parallel_cross_entropy",
    "megatron.core.tensor_parallel.data": "broadcast_data",
    "megatron.core.tensor_parallel.mappings": "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region",
    "megatron.core.tensor_parallel.random": "CudaRNGStatesTracker get_cuda_rng_tracker checkpoint "
    "model_parallel_cuda_manual_seed",
    "megatron.core.tensor_parallel.utils": "split_tensor_along_last_dim VocabUtility divide gather_split_1d_tensor "
    "split_tensor_into_1d_equal_chunks",
    "megatron.core.pipeline_parallel": "get_forward_backward_func",
    "megatron.core.pipeline_parallel.schedules": "deallocate_output_tensor forward_backward_no_pipelining "
    "forward_backward_pipelining_with_interleaving forward_backward_pipelining_without_interleaving get_forward_backward_func",
    "megatron.core.dist_checkpointing": "ShardedTensor check_is_distributed_checkpoint load load_common_state_dict load_content_metadata "
    "load_plain_tensors save",
    "megatron.core.dist_checkpointing.mapping": "ShardedObject ShardedTensor",
    "megatron.core.transformer.utils": "make_sharded_tensors_for_checkpoint",
    "megatron.core.dist_checkpointing.serialization": "load load_common_state_dict load_plain_tensors save",
    "megatron.core.optimizer": "MegatronOptimizer OptimizerConfig get_megatron_optimizer",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler",
    "megatron.training.tokenizer": "build_tokenizer",
    "megatron.training.tokenizer.tokenizer": "_NullTokenizer build_tokenizer",
    "megatron.core.distributed": "DistributedDataParallel DistributedDataParallelConfig MemoryBuffer finalize_model_grads",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel",
    "megatron.core.distributed.distributed_data_parallel_config": "DistributedDataParallelConfig",
    "megatron.core.distributed.finalize_model_grads": "finalize_model_grads",
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "megatron.core.transformer": "TransformerConfig ParallelTransformer ParallelTransformerLayer ParallelAttention ParallelMLP "
    "MegatronModule ModuleSpec TransformerLayer TransformerLayerSubmodules build_module",
    "megatron.core.transformer.transformer_config": "TransformerConfig",
    "megatron.core.transformer.attention": "CrossAttention CrossAttentionSubmodules SelfAttention SelfAttentionSubmodules",
    "megatron.core.transformer.dot_product_attention": "DotProductAttention",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType",
    "megatron.core.transformer.identity_op": "IdentityFuncOp IdentityOp",
    "megatron.core.transformer.mlp": "MLP MLPSubmodules",
    "megatron.core.transformer.module": "Float16Module MegatronModule",
    "megatron.core.transformer.spec_utils": "ModuleSpec build_module get_module import_module",
    "megatron.core.transformer.torch_norm": "WrappedTorchNorm",
    "megatron.core.transformer.transformer_block": "TransformerBlock TransformerBlockSubmodules",
    "megatron.core.transformer.transformer_layer": "TransformerLayer TransformerLayerSubmodules",
    "megatron.core.fusions.fused_bias_dropout": "get_bias_dropout_add",
    "megatron.core.fusions.fused_layer_norm": "FusedLayerNorm",
    "megatron.core.models.common.embeddings.language_model_embedding": "LanguageModelEmbedding",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "RotaryEmbedding",
    "megatron.core.models.gpt.gpt_layer_specs": "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec",
    "megatron.core.models.bert.bert_layer_specs": "bert_layer_local_spec bert_layer_with_transformer_engine_spec",
    "megatron.core.datasets.blended_dataset": "BlendedDataset",
    "megatron.core.datasets.blended_megatron_dataset_config": "BlendedMegatronDatasetConfig",
    "megatron.core.datasets.indexed_dataset": "IndexedDataset MMapIndexedDataset",
    "megatron.core.datasets.megatron_dataset": "LowLevelDataset MegatronDataset",
    "megatron.core.datasets.utils": "Split compile_helpers",
    "megatron.core.models.T5.t5_spec": "get_t5_decoder_with_local_block_spec "
    "get_t5_decoder_with_transformer_engine_block_spec get_t5_encoder_with_local_block_spec "
    "get_t5_encoder_with_transformer_engine_block_spec",
    "megatron.core.packed_seq_params": "PackedSeqParams",
    "megatron.core.extensions.transformer_engine": "TENorm TEColumnParallelLinear TERowParallelLinear",
    "megatron.core.transformer.custom_layers.transformer_engine": "TEColumnParallelLinear TEDotProductAttention "
    "TELayerNormColumnParallelLinear TENorm TERowParallelLinear",
    "megatron.core.transformer.moe.grouped_gemm_util": "assert_grouped_gemm_is_available grouped_gemm_is_available",
    "megatron.core.transformer.moe.moe_utils": "get_capacity group_limited_topk sinkhorn z_loss_func "
    "topk_routing_with_score_function compute_routing_scores_for_aux_loss switch_load_balancing_loss_func "
    "get_updated_expert_bias apply_router_token_dropping",
    "megatron.model": "BertModel Float16Module GPTModel",
    "megatron.tokenizer.gpt2_tokenization": "PRETRAINED_MERGES_ARCHIVE_MAP PRETRAINED_VOCAB_ARCHIVE_MAP",
    "megatron.core.models": "GPTModel TransformerLanguageModel",
    "megatron.core.models.gpt.gpt_stage": "GPTModel",
    "megatron.training": "evaluate get_args get_tokenizer print_rank_0 print_rank_last pretrain initialize_megatron get_model "
    "setup_model_and_optimizer build_train_valid_test_data_iterators",
    "megatron.training.training": "pretrain setup_model_and_optimizer",
    "megatron.training.initialize": "initialize_megatron",
    "megatron.training.arguments": "core_transformer_config_from_args parse_args",
    "megatron.training.utils": "average_losses_across_data_parallel_group get_ltor_masks_and_position_ids unwrap_model "
    "print_rank_last print_rank_0",
}


@pytest.mark.parametrize("module, name", [(module, name) for module, names in NAMES.items() for name in names.split()])
def test_a_name_is_where_forks_import_it_from(module, name):
    exec(f"from {module} import {name}")
    assert getattr(importlib.import_module(module), name) is not None


def test_one_name_is_one_object_under_every_path_of_megatron():
    """So that `layers.ColumnParallelLinear` takes the arguments of `tensor_parallel.ColumnParallelLinear`."""
    package = importlib.import_module("megatron.core.tensor_parallel")
    for module in ("layers", "cross_entropy", "data", "mappings", "random", "utils"):
        path = f"megatron.core.tensor_parallel.{module}"
        for name in NAMES[path].split():
            assert getattr(importlib.import_module(path), name) is getattr(package, name), (path, name)


def test_the_old_flat_names_are_the_same_objects():
    import megatron.mpu
    from megatron.training import global_vars

    assert megatron.core.mpu is parallel_state and megatron.mpu.get_mesh is parallel_state.get_mesh
    assert megatron.mpu.broadcast_data is megatron.core.tensor_parallel.broadcast_data
    assert megatron.get_args is global_vars.get_args and megatron.print_rank_0 is global_vars.print_rank_0


# ---------------------------------------------------------------- mpu

# 16 ranks, tensor size 2, pipeline size 4, hence data-parallel size 2 (megatron's own example): rank -> what it is told
#      tp rank, group   dp rank, group   pp rank, group           previous, next   first, last   in embd, pos_embd
TABLE = {
    0: (0, [0, 1], 0, [0, 2], 0, [0, 4, 8, 12], 12, 4, True, False, True, True),
    3: (1, [2, 3], 1, [1, 3], 0, [3, 7, 11, 15], 15, 7, True, False, True, True),
    6: (0, [6, 7], 1, [4, 6], 1, [2, 6, 10, 14], 2, 10, False, False, False, False),
    9: (1, [8, 9], 0, [9, 11], 2, [1, 5, 9, 13], 5, 13, False, False, False, False),
    15: (1, [14, 15], 1, [13, 15], 3, [3, 7, 11, 15], 11, 3, False, True, True, False),
}


class Ranks:
    """A group that is its ranks."""

    def __init__(self, name, ranks):
        self.ranks = list(ranks)


def mesh_of(rank, **options):
    return build_mesh(AxisSizes(tp=2, pp=4, dp=2), rank, Ranks, **options)


@pytest.fixture
def at():
    """Makes this process one of 16 ranks, for the accessors."""
    yield lambda rank, **options: parallel_state.set_thread_mesh(mesh_of(rank, **options))
    parallel_state.set_thread_mesh(None)


@pytest.mark.parametrize("rank", TABLE)
def test_accessors_tell_each_of_16_ranks_its_place(rank, at):
    at(rank)
    told = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_group().ranks,
        mpu.get_data_parallel_rank(with_context_parallel=True),
        mpu.get_data_parallel_group(with_context_parallel=True).ranks,
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_group().ranks,
        mpu.get_pipeline_model_parallel_prev_rank(),
        mpu.get_pipeline_model_parallel_next_rank(),
        mpu.is_pipeline_first_stage(),
        mpu.is_pipeline_last_stage(),
        mpu.is_rank_in_embedding_group(),
        mpu.is_rank_in_position_embedding_group(),
    )
    assert told == TABLE[rank]
    tp, dp, pp = told[1], told[3], told[5]
    assert (mpu.get_tensor_model_parallel_src_rank(), mpu.get_data_parallel_src_rank()) == (tp[0], dp[0])
    assert (
        mpu.get_pipeline_model_parallel_first_rank() == pp[0] and mpu.get_pipeline_model_parallel_last_rank() == pp[3]
    )
    sizes = ("tensor_model", "data", "pipeline_model", "context", "expert_model", "expert_tensor", "expert_data")
    assert [getattr(mpu, f"get_{n}_parallel_world_size")() for n in sizes] == [2, 2, 4, 1, 1, 2, 2]
    assert mpu.get_expert_tensor_parallel_rank() == told[0] and mpu.get_expert_data_parallel_rank() == told[2]
    assert sorted(mpu.get_model_parallel_group().ranks) == [r for r in range(16) if r // 2 % 2 == rank // 2 % 2]
    assert mpu.get_model_parallel_src_rank() == rank // 2 % 2 * 2


# 8 ranks, tensor size 2, 4 parts of the experts, whole each: ranks 0 to 3 have all experts, and so have 4 to 7
# rank -> all experts: rank, group; first of them; copies of its experts: rank, group
EXPERT_TABLE = {
    0: (0, [0, 1, 2, 3], 0, 0, [0, 4]),
    3: (3, [0, 1, 2, 3], 0, 0, [3, 7]),
    5: (1, [4, 5, 6, 7], 4, 1, [1, 5]),
}


@pytest.mark.parametrize("rank", EXPERT_TABLE)
def test_accessors_tell_the_ranks_of_experts_by_the_names_of_each_release(rank):
    parallel_state.set_thread_mesh(build_mesh(AxisSizes(tp=2, dp=4, ep=4, etp=1), rank, Ranks))
    try:
        own, whole, first, copy, copies = EXPERT_TABLE[rank]
        for name in ("tensor_and_expert", "expert_tensor_and_model"):
            assert getattr(mpu, f"get_{name}_parallel_group")().ranks == whole
            assert getattr(mpu, f"get_{name}_parallel_rank")() == own
            assert getattr(mpu, f"get_{name}_parallel_world_size")() == 4
        assert mpu.get_expert_model_parallel_src_rank() == first
        assert mpu.get_data_modulo_expert_parallel_group(with_context_parallel=True).ranks == copies
        assert mpu.get_data_modulo_expert_parallel_group(partial_expert_data_parallel=True).ranks == copies
        assert mpu.get_expert_data_parallel_group(with_gtp_remat=False).ranks == copies
        assert (
            mpu.get_data_modulo_expert_parallel_rank() == copy == mpu.get_expert_data_parallel_rank(with_gtp_remat=True)
        )
        assert mpu.get_model_parallel_group(with_expert_parallel=True).ranks == whole
        assert mpu.get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True).ranks == whole
        assert mpu.get_tensor_and_context_parallel_rank() == rank % 2
        assert mpu.get_tensor_and_context_parallel_world_size() == 2
        mpu.set_expert_tensor_parallel_world_size(1)
        with pytest.raises(Exception, match="set_expert_tensor_parallel_world_size"):
            mpu.set_expert_tensor_parallel_world_size(2)
    finally:
        parallel_state.set_thread_mesh(None)


def test_copies_of_experts_without_the_ranks_of_context_parallelism_are_refused():
    parallel_state.set_thread_mesh(build_mesh(AxisSizes(cp=2, dp=2, ep=2, etp=1), 0, Ranks))
    try:
        assert mpu.get_data_modulo_expert_parallel_group().ranks == [0, 2]
        with pytest.raises(NotImplementedError, match="with_context_parallel=True"):
            mpu.get_data_modulo_expert_parallel_group(with_context_parallel=False)
    finally:
        parallel_state.set_thread_mesh(None)


def test_the_embedding_group_is_first_and_last_stage_or_what_a_script_says(at):
    at(5)
    assert mpu.get_embedding_group() is None, "a stage between has no table, and nobody to share it with"
    at(13)
    assert mpu.get_embedding_group().ranks == [1, 13]
    at(5, embedding_ranks=stage_ranks(lambda pipeline: pipeline[:2]))
    assert mpu.get_embedding_group().ranks == [1, 5] and mpu.is_rank_in_embedding_group()
    at(13, embedding_ranks=stage_ranks(lambda pipeline, split: pipeline[:2]))
    assert not mpu.is_rank_in_embedding_group()
    at(13, position_embedding_ranks=lambda pipeline: (pipeline[0], pipeline[-1]))
    assert mpu.get_position_embedding_group().ranks == [1, 13]
    with pytest.raises(ConfigError, match=r"(?s)\[2\].*1.*5.*9.*13"):
        at(13, embedding_ranks=lambda pipeline: (2,))


def test_with_chunks_only_one_of_them_is_first(at):
    at(0)
    mpu.set_virtual_pipeline_model_parallel_world_size(2)
    told = []
    for chunk in (0, 1):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        told.append((mpu.is_pipeline_first_stage(), mpu.is_pipeline_first_stage(ignore_virtual=True)))
        told.append(
            (mpu.is_pipeline_first_stage(vp_stage=1 - chunk), mpu.is_rank_in_embedding_group(ignore_virtual=False))
        )
    assert told == [(True, True), (False, True), (False, True), (True, False)]


# Rank 13 of the 16 above: setter, what is so, what is not.
SETTERS = [
    ("set_tensor_model_parallel_rank", 1, 0),
    ("set_tensor_model_parallel_world_size", 2, 1),
    ("set_pipeline_model_parallel_rank", 3, 0),
    ("set_pipeline_model_parallel_world_size", 4, 8),
    ("set_data_parallel_rank", 0, 1),
    ("set_expert_model_parallel_rank", 0, 1),
    ("set_expert_model_parallel_world_size", 1, 2),
]


@pytest.mark.parametrize("name, is_so, is_not", SETTERS)
def test_a_rank_cannot_pretend_to_be_another(name, is_so, is_not, at):
    at(13)
    for value in (is_so, None):
        getattr(mpu, name)(value)
        assert getattr(mpu, name.replace("set_", "get_"))() == is_so
    with pytest.raises(ConfigError, match=rf"(?s){name}\({is_not}.*{is_so}"):
        getattr(mpu, name)(is_not)


def test_the_number_of_chunks_is_set_as_in_megatron(at):
    at(0)
    mpu.set_virtual_pipeline_model_parallel_world_size(3)
    mpu.set_virtual_pipeline_model_parallel_rank(2)
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 3 and not mpu.is_pipeline_first_stage()
    mpu.set_virtual_pipeline_model_parallel_world_size(None)
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None and mpu.is_pipeline_first_stage()


ACCESSORS = [
    name
    for name in NAMES["megatron.core.parallel_state"].split()
    if name.startswith(("get_", "is_pipeline", "is_rank"))
]


@pytest.mark.parametrize("name", [name for name in ACCESSORS if name not in parallel_state._NOT_BUILT])
def test_no_accessor_answers_before_initialisation(name):
    assert not mpu.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        getattr(mpu, name)()


@pytest.mark.parametrize("name", parallel_state._NOT_BUILT)
def test_what_is_not_built_says_so_when_it_is_called(name):
    with pytest.raises(NotImplementedError, match=f"{name}: "):
        getattr(mpu, name)(1)
    with pytest.raises(AttributeError):
        mpu.get_something_else  # noqa: B018


ARGUMENTS_AND_SAID = [
    ({"expert_model_parallel_size": 2}, "(1) 2 expert-model-parallel-size (2)"),  # of one rank
    ({"expert_tensor_parallel_size": 2}, "(1) 2 expert-tensor-parallel-size (2)"),
    ({"use_sharp": True}, "use_sharp=True"),
]


@pytest.mark.parametrize("arguments, said", ARGUMENTS_AND_SAID)
def test_groups_that_are_not_built_or_cannot_be_are_refused(arguments, said):
    with raises_telling(ConfigError, said):
        mpu.initialize_model_parallel(**arguments)
    with pytest.raises(TypeError, match="no arguments"):
        mpu.initialize_model_parallel(tensor_size=2)


@pytest.fixture
def one_of_16(monkeypatch):
    """This process as rank 6 of a job whose groups are written down: [(ranks, options)]."""
    made = []

    def new_group(ranks, **options):
        made.append((ranks, options))
        return object()

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    monkeypatch.setattr(torch.distributed, "group", types.SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(initialize_model_parallel, "_world_of_first_mesh", None)
    yield made
    parallel_state.destroy_model_parallel()


# Arguments after the third, as releases order them -> what they set.
BY_POSITION = [
    ((None,), {}),
    ((None, False, 2), {"context_parallel_size": 2}),  # core 0.8, and core 0.16
    ((None, None, False, 4, None, 1), {"context_parallel_size": 4}),  # core 0.12
    ((None, False, 2, None, False, 1, 2), {"context_parallel_size": 2, "num_distributed_optimizer_instances": 2}),
    ((None, False, 1, 1, None, 7), {"distributed_timeout_minutes": 7}),
    (("nccl", False, 2), {"pipeline_model_parallel_comm_backend": "nccl", "context_parallel_size": 2}),
    ((1,), {"pipeline_model_parallel_split_rank": 1}),
]


@pytest.mark.parametrize(("values", "meaning"), BY_POSITION)
def test_positional_arguments_are_those_of_the_release_that_they_fit(values, meaning):
    assert initialize_model_parallel.named_arguments(values) == meaning


@pytest.mark.parametrize("values", [(None, 2), (None, False, 1, 2, "file", 1, 1, 1), (False,)])
def test_positional_arguments_of_no_release_are_refused(values):
    with pytest.raises(TypeError, match="by name"):
        mpu.initialize_model_parallel(1, 1, None, *values)
    assert not mpu.model_parallel_is_initialized()


def test_a_fifth_positional_argument_lays_out_the_job(one_of_16):
    mesh = mpu.initialize_model_parallel(2, 2, None, None, False, 2)
    assert {name: mesh[name].size for name in ("tp", "pp", "cp", "dp")} == {"tp": 2, "pp": 2, "cp": 2, "dp": 2}
    mpu.destroy_model_parallel()
    with pytest.raises(TypeError, match="context_parallel_size by position and by name"):
        mpu.initialize_model_parallel(2, 2, None, None, False, 2, context_parallel_size=2)


@pytest.fixture
def before_the_start(monkeypatch):
    monkeypatch.setattr(global_state, "_process_state", None)
    yield
    global_state.announced.clear()


def test_sizes_and_ranks_may_be_set_before_the_start(before_the_start, one_of_16):
    """As Megatron's lazy start does: they are told until then, and have to be right."""
    for name, value in (("tensor_model_parallel_world_size", 2), ("pipeline_model_parallel_rank", 1)):
        with pytest.raises(RuntimeError, match="initialize_model_parallel"):
            getattr(mpu, f"get_{name}")()
        getattr(mpu, f"set_{name}")(value)
        assert getattr(mpu, f"get_{name}")() == value
    mpu.set_data_parallel_rank(5)
    mpu.set_data_parallel_rank(None)
    mpu.initialize_model_parallel(2, 4)
    assert mpu.get_tensor_model_parallel_world_size() == 2 and not global_state.announced


@pytest.mark.parametrize(
    ("setter", "value", "actual"),
    [("set_tensor_model_parallel_world_size", 4, 2), ("set_pipeline_model_parallel_rank", 3, 1)],
)
def test_what_was_set_before_and_is_not_so_is_refused(setter, value, actual, before_the_start, one_of_16):
    getattr(mpu, setter)(value)
    with pytest.raises(ConfigError, match=rf"(?s){setter}\({value}.*{actual}"):
        mpu.initialize_model_parallel(2, 4)
    assert not mpu.model_parallel_is_initialized()


def test_the_timeout_reaches_every_group(one_of_16):
    mpu.initialize_model_parallel(
        2, 4, distributed_timeout_minutes=7, use_sharp=False, create_gloo_process_groups=False
    )
    assert [ranks for ranks, _ in one_of_16][:2] == [[6, 7], [2, 6, 10, 14]]
    assert {options["timeout"].total_seconds() for _, options in one_of_16} == {420.0}


def test_an_axis_of_one_rank_has_a_group_of_one_rank(one_of_16):
    """None would be all ranks to torch.distributed.all_reduce(x, group=mpu.get_tensor_model_parallel_group())."""
    mpu.initialize_model_parallel(1, 16)
    assert len(one_of_16) == 3, "the pipeline, and its two directions"
    group = mpu.get_tensor_model_parallel_group()
    assert group is not None and group is mpu.get_data_parallel_group() is mpu.get_context_parallel_group()
    assert one_of_16[3:] == [([6], {"use_local_synchronization": True})]


def test_the_groups_of_a_second_mesh_are_made_by_all_ranks_in_one_order(one_of_16):
    """torch names a group that its members make alone by the number of groups that a member has had."""
    mpu.initialize_model_parallel(2, 4)
    assert all(6 in ranks and options["use_local_synchronization"] for ranks, options in one_of_16)
    mpu.destroy_model_parallel()
    one_of_16.clear()
    mpu.initialize_model_parallel(4, 2)
    assert not any(options["use_local_synchronization"] for _, options in one_of_16)
    tp = [ranks for ranks, options in one_of_16 if options["group_desc"] == "tp"]
    assert tp == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert mpu.get_tensor_model_parallel_rank() == 2


def test_the_tracker_has_no_states_before_there_is_a_mesh(monkeypatch):
    monkeypatch.setattr(global_state, "_process_state", None)
    assert importlib.import_module("megatron.core.tensor_parallel.random")._CUDA_RNG_STATE_TRACKER.get_states() == {}


def test_groups_need_torch_distributed_first(monkeypatch):
    monkeypatch.setattr(global_state, "_process_state", None)  # an earlier test may have built a model alone
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"(?s)4.*torch.distributed"):
        mpu.initialize_model_parallel(2)


def test_the_memory_buffer_hands_out_the_same_memory(at):
    at(0)
    first = mpu.get_global_memory_buffer().get_tensor((2, 3), torch.float32, "gathered")
    again = mpu.get_global_memory_buffer().get_tensor((4,), torch.float32, "gathered")
    assert first.shape == (2, 3) and again.shape == (4,) and first.data_ptr() == again.data_ptr()
    assert mpu.get_global_memory_buffer().get_tensor((4,), torch.float32, "other").data_ptr() != first.data_ptr()
