"""Megatron has these names; they are defined elsewhere here, or nowhere, with the reason.

A script that imports one of them is not stopped by the import. One that is not built raises NotImplementedError when it
is called. A module of these tables that has no file here is made when it is imported (`import_hook_for_megatron_paths`).
"""

from collections.abc import Mapping

from megatron.core.base import megatron_core_modules_without_file, megatron_names_outside_core

# Module -> the module that defines the name here -> names, separated by blanks.
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    **megatron_names_outside_core.ELSEWHERE,
    **megatron_core_modules_without_file.ELSEWHERE,
    "megatron.core": {"megatron.core.num_microbatches_calculator": "init_num_microbatches_calculator"},
    "megatron.core.datasets.blended_megatron_dataset_config": {
        "megatron.core.datasets.gpt_dataset": "GPTDatasetConfig",
        "megatron.core.datasets.utils": "Split",
    },
    "megatron.core.datasets.bert_dataset": {
        "megatron.core.datasets.indexed_dataset": "IndexedDataset MMapIndexedDataset",
        "megatron.core.datasets.utils": "Split",
    },
    "megatron.core.datasets.blended_dataset": {
        "megatron.core.datasets.blended_megatron_dataset_config": "BlendedMegatronDatasetConfig",
        "megatron.core.datasets.megatron_dataset": "MegatronDataset",
    },
    "megatron.core.datasets.blended_megatron_dataset_builder": {
        "megatron.core.datasets.blended_megatron_dataset_config": "BlendedMegatronDatasetConfig",
        "megatron.core.datasets.megatron_dataset": "MegatronDataset",
    },
    "megatron.core.datasets.gpt_dataset": {
        "megatron.core.datasets.indexed_dataset": "IndexedDataset MMapIndexedDataset"
    },
    "megatron.core.datasets.megatron_dataset": {
        "megatron.core.datasets.indexed_dataset": "MMapIndexedDataset",
        "megatron.core.datasets.utils": "Split",
    },
    "megatron.core.dist_checkpointing.serialization": {"megatron.core.dist_checkpointing.mapping": "ShardedTensor"},
    "megatron.core.models.T5": {"megatron.core.models.T5.t5_model": "T5Model"},
    "megatron.core.models.T5.t5_spec": {
        "megatron.core.tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear",
        "megatron.core.transformer.dot_product_attention": "DotProductAttention",
        "megatron.core.transformer.enums": "AttnMaskType",
    },
    "megatron.core.models.bert.bert_layer_specs": {
        "megatron.core.tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear",
        "megatron.core.transformer.attention": "SelfAttention SelfAttentionSubmodules",
        "megatron.core.transformer.bias_dropout_add": "get_bias_dropout_add",
        "megatron.core.transformer.dot_product_attention": "DotProductAttention",
        "megatron.core.transformer.identity_op": "IdentityOp",
        "megatron.core.transformer.mlp": "MLP MLPSubmodules",
        "megatron.core.transformer.spec_utils": "ModuleSpec",
        "megatron.core.transformer.torch_norm": "FusedLayerNorm",
        "megatron.core.transformer.transformer_layer": "TransformerLayer TransformerLayerSubmodules",
    },
    "megatron.core.models.bert.bert_model": {"megatron.core.utils": "get_te_version"},
    "megatron.core.models.gpt.gpt_layer_specs": {
        "megatron.core.tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear",
        "megatron.core.transformer.attention": "SelfAttention SelfAttentionSubmodules",
        "megatron.core.transformer.bias_dropout_add": "get_bias_dropout_add",
        "megatron.core.transformer.dot_product_attention": "DotProductAttention",
        "megatron.core.transformer.enums": "AttnMaskType",
        "megatron.core.transformer.identity_op": "IdentityOp",
        "megatron.core.transformer.mlp": "MLP MLPSubmodules",
        "megatron.core.transformer.torch_norm": "FusedLayerNorm",
        "megatron.core.transformer.transformer_layer": "TransformerLayer TransformerLayerSubmodules",
    },
    "megatron.core.tokenizers.text.utils.build_tokenizer": {
        "megatron.core.tokenizers.utils.build_tokenizer": "build_tokenizer"
    },
    "megatron.core.optimizer": {
        "megatron.core": "mpu",
        "megatron.core.transformer.module": "MegatronModule",
        "megatron.core.utils": "get_model_config",
    },
    "megatron.core.transformer.enums": {"megatron.core.enums": "ModelType"},
    "megatron.core.parallel_state": {
        "megatron.core.transformer.moe.megatron_aux_losses_tracker": "get_moe_layer_wise_logging_tracker"
    },
    "megatron.core.transformer.moe.moe_utils": {
        "megatron.core.ops.aux_loss_collector": "MoEAuxLossAutoScaler",
        "megatron.core.transformer.moe.megatron_aux_losses_tracker": (
            "clear_aux_losses_tracker get_moe_layer_wise_logging_tracker reduce_aux_losses_tracker_across_ranks "
            "save_to_aux_losses_tracker track_moe_metrics"
        ),
        "megatron.core.transformer.moe.megatron_routing_functions": (
            "apply_router_token_dropping compute_routing_scores_for_aux_loss get_updated_expert_bias "
            "switch_load_balancing_loss_func topk_routing_with_score_function"
        ),
    },
    "megatron.core.transformer.moe.router": {
        "megatron.core.ops.aux_loss_collector": "MoEAuxLossAutoScaler",
        "megatron.core.transformer.moe.megatron_aux_losses_tracker": "save_to_aux_losses_tracker",
    },
    "megatron.core.transformer.moe.shared_experts": {"megatron.core.tensor_parallel": "get_cuda_rng_tracker"},
    "megatron.core.transformer.custom_layers.transformer_engine": {"megatron.core.utils": "get_te_version"},
    "megatron.core.utils": {
        "megatron.core.base.megatron_helpers_without_effect": (
            "WrappedTensor assert_viewless_tensor deprecate_inference_params is_float8tensor make_viewless_tensor "
            "nvtx_range_pop nvtx_range_push safely_set_viewless_tensor_data"
        )
    },
    "megatron.core.transformer.transformer_block": {
        "megatron.core.transformer.enums": "AttnMaskType",
        "megatron.core.transformer.torch_norm": "FusedLayerNorm",
    },
}
# Switches of Megatron's that tell whether an optional package is used: none is.
SWITCHED_OFF = (
    "ENABLE_EXPERIMENTAL HAS_BACKEND HAS_BFLOAT16 HAS_FLASK HAVE_ABSL HAVE_APEX HAVE_APEX_OR_TE "
    "HAVE_APPLY_ROPE_FUSION HAVE_CUPY HAVE_DEEP_EP HAVE_DTENSOR HAVE_EINOPS HAVE_EMERGING_OPTIMIZERS HAVE_EO_V02 "
    "HAVE_FA3 HAVE_FA4 HAVE_FAISS HAVE_FLA HAVE_FLASHINFER HAVE_FLASHINFER_CUBIN_AND_JIT_CACHE HAVE_FLASK HAVE_FMLA "
    "HAVE_FSDP HAVE_FSDP2 HAVE_FUSED_LAYER_NORM HAVE_FUSED_QKV_ROPE HAVE_GROUPED_MM HAVE_GTP HAVE_H5PY HAVE_HYBRIDEP "
    "HAVE_KITCHEN HAVE_MAMBA_SSM HAVE_MCORE HAVE_MEGATRON_CORE HAVE_MEGATRON_FSDP HAVE_MSGPACK HAVE_NVRX HAVE_NVSHMEM "
    "HAVE_NVTX HAVE_ORJSON HAVE_PACKAGING HAVE_PERSIST_LAYER_NORM HAVE_PSUTIL HAVE_SCALED_GMM HAVE_SP "
    "HAVE_SSM_OPS_VARLEN HAVE_TE HAVE_TENSORSTORE HAVE_TEX HAVE_TE_BLOCKWISE_FP8TENSOR "
    "HAVE_TE_CAST_MASTER_WEIGHTS_TO_FP8 HAVE_TE_EP HAVE_TE_FLOAT8TENSOR HAVE_TE_FP4_TENSOR_CLASS "
    "HAVE_TE_FP8_TENSOR_CLASS HAVE_TE_GRAPHS HAVE_TE_GROUPED_TENSOR_CLASS HAVE_TE_MXFP8TENSOR "
    "HAVE_TE_POST_ALL_GATHER_PROCESSING HAVE_TILELANG HAVE_TILELANG_INDEXER HAVE_TILELANG_SPARSE_MLA "
    "HAVE_TORCH_MEMORY_SAVER HAVE_TORCH_SCALED_MM HAVE_TORCH_SYMM_MEM HAVE_TQDM HAVE_TRANSFORMERS HAVE_TRITON "
    "HAVE_TRTLLM HAVE_WANDB HAVE_WGET HAVE_YAML HAVE_ZARR HAVE_ZMQ IS_CHECKPOINTING MAMBA_HAS_STATE_DTYPE "
    "TRITON_HAS_CACHE_RESULTS USING_APEX_OPTIMIZER USING_TE_OPTIMIZER has_nvidia_modelopt has_nvidia_resiliency_ext "
    "has_nvml has_unified_memory is_gtp_param"
)

# Module, or package of modules -> the reason why its names are not built, and what to use instead.
REASONS: Mapping[str, str] = {
    **megatron_names_outside_core.REASONS,
    **megatron_core_modules_without_file.REASONS,
    "megatron.core": "nothing here unpickles, so no globals are registered as safe",
    "megatron.core.datasets": (
        "use GPTDataset, BERTMaskedWordPieceDataset, or a data set of your own from the script's provider "
        "(docs/adding_a_model.md)"
    ),
    "megatron.core.datasets.indexed_dataset": (
        "write token files by tools/preprocess_data.py or "
        "megatron.core.datasets.indexed_dataset_writer.IndexedDatasetWriter"
    ),
    "megatron.core.dist_checkpointing": (
        "checkpoints are cut by each parameter's placement (docs/checkpoint_format.md); save and load take plain and "
        "ShardedTensor entries"
    ),
    "megatron.core.distributed": "sharding of parameters is --zero-stage 3 or --use-megatron-fsdp",
    "megatron.core.enums": "there is no fp8 or fp4 here",
    "megatron.core.extensions": "Transformer Engine is not used; its layer specs are built from our own layers",
    "megatron.core.fusions": "fused operations are chosen by --compile",
    "megatron.core.models": (
        "build GPTModel, BertModel or T5Model with the specs that are here, or a model of your own "
        "(docs/adding_a_model.md)"
    ),
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": (
        "the attentions that are here are chosen by flags of the model (docs/model_options.md); leave out "
        "--experimental-attention-variant"
    ),
    "megatron.core.models.gpt.heterogeneous": (
        "all layers of a model have the same shape; leave out --heterogeneous-layers-config-path, or write a layer of "
        "your own (docs/adding_a_model.md)"
    ),
    "megatron.core.models.gpt.moe_module_specs": (
        "experts are asked for by num_moe_experts of TransformerConfig (--num-experts), and built by the GPTModel "
        "(docs/experts.md)"
    ),
    "megatron.core.models.hybrid": "there are no state-space layers; use GPTModel, or a layer of your own",
    "megatron.core.models.mamba": "there are no state-space layers; use GPTModel, or a layer of your own",
    "megatron.core.num_microbatches_calculator": (
        "use init_num_microbatches_calculator, and reconfigure_num_microbatches_calculator"
    ),
    "megatron.core.process_groups_config": "groups are those of ProcessGroupCollection.use_mpu_process_groups()",
    "megatron.core.optimizer": (
        "get_megatron_optimizer makes the optimizer; groups of parameters are ParamGroups (docs/optimizers.md)"
    ),
    "megatron.core.optimizer_param_scheduler": (
        "OptimizerParamScheduler takes no overrides; rates of groups are ParamGroups (docs/optimizers.md)"
    ),
    "megatron.core.parallel_state": (
        "ranks are placed by initialize_model_parallel, and their groups are asked by the accessors that are here"
    ),
    "megatron.core.pipeline_parallel": (
        "a step runs by get_forward_backward_func(); its schedule is a list of actions (docs/schedules.md)"
    ),
    "megatron.core.model_parallel_config": "weights are not gathered by tensor-parallel ranks for a product",
    "megatron.core.rerun_state_machine": (
        "a step is computed again by the run's own checks, such as --rerun-interval (docs/reliability.md)"
    ),
    "megatron.core.tensor_parallel": (
        "split layers are ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding; their regions are in "
        "mappings"
    ),
    "megatron.core.timers": "Timers makes the timers of a run",
    "megatron.core.tokenizers": (
        "tokenizers are built by megatron.core.tokenizers.build_tokenizer (docs/data_preparation.md)"
    ),
    "megatron.core.transformer": (
        "layers are built from the specs that are here, or are your own modules (docs/adding_a_model.md)"
    ),
    "megatron.core.transformer.moe": (
        "experts are asked for by num_moe_experts of TransformerConfig (--num-experts); their layer is "
        "moe.moe_layer.ParallelMoE, of ParallelRouter, AllToAllDispatcher or AllGatherDispatcher, ParallelExperts and "
        "ParallelSharedExperts, and a layer of your own may take their place (docs/experts.md)"
    ),
    "megatron.core.transformer.moe.moe_logging": "auxiliary losses are in the log, and by layer with --moe-per-layer-logging",
    "megatron.core.transformer.moe.router_replay": "use RouteReplay of megatron.core.transformer.moe.in_memory_route_replay",
    "megatron.core.transformer.moe.upcycling_utils": (
        "make experts of a dense checkpoint by tools/checkpoint_convert.py --num-experts, and train from the result"
    ),
    "megatron.core.transformer.multi_token_prediction": (
        "a model predicts the next token alone; leave out --mtp-num-layers"
    ),
    "megatron.core.utils": "it serves parts of Megatron that are not here",
}
# Module -> names that are not built.
NOT_BUILT: Mapping[str, str] = {
    **megatron_names_outside_core.NOT_BUILT,
    **megatron_core_modules_without_file.NOT_BUILT,
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": (
        "get_dsa_module_spec_for_backend get_experimental_attention_variant_module_spec "
        "get_gated_delta_net_module_spec get_linear_attention_pattern get_moe_layer_pattern "
        "get_transformer_block_with_experimental_attention_variant_spec "
        "get_transformer_layer_with_experimental_attention_variant_spec is_linear_attention_variant"
    ),
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "LNImpl get_gpt_heterogeneous_layer_spec",
    "megatron.core.models.hybrid.hybrid_model": "HybridModel",
    "megatron.core.models.mamba": "HybridModel MambaModel",
    "megatron.core.tensor_parallel.utils": "dist_all_gather_func",
    "megatron.core": "register_safe_globals safe_load_from_bytes",
    "megatron.core.datasets.blended_megatron_dataset_builder": "DistributedDataset MidLevelDataset TopLevelDataset",
    "megatron.core.datasets.blended_megatron_dataset_config": (
        "convert_split_vector_to_split_matrix parse_and_normalize_split"
    ),
    "megatron.core.datasets.gpt_dataset": "MockGPTLowLevelDataset",
    "megatron.core.datasets.indexed_dataset": (
        "DType IndexedDatasetBuilder MMapIndexedDatasetBuilder OBJECT_STORAGE_BIN_READERS get_bin_path get_idx_path"
    ),
    "megatron.core.datasets.utils": "log_single_rank normalize",
    "megatron.core.dist_checkpointing": (
        "LocalNonpersistentObject LocalNonpersitentObject load_tensors_metadata remove_sharded_tensors"
    ),
    "megatron.core.dist_checkpointing.mapping": (
        "CommonStateDict FactoryBuildFn FactoryMergeFn LocalNonpersistentObject LocalNonpersitentObject ReplicaId "
        "ShardedBase ShardedStateDict ShardedTensorFactory StateDict apply_factories apply_factory_merges "
        "is_main_replica"
    ),
    "megatron.core.dist_checkpointing.serialization": (
        "COMMON_STATE_FNAME CkptShardedMetadata get_default_load_sharded_strategy get_default_save_common_strategy "
        "get_default_save_sharded_strategy load_sharded_metadata load_sharded_objects load_tensors_metadata "
        "remove_sharded_tensors validate_objects_sharding_integrity validate_sharding_integrity"
    ),
    "megatron.core.distributed": (
        "FullyShardedDataParallel TorchFullyShardedDataParallel TorchFullyShardedDataParallelConfig shard_buffer"
    ),
    "megatron.core.distributed.finalize_model_grads": "reset_model_temporary_tensors",
    "megatron.core.enums": "Fp4Recipe Fp8Recipe",
    "megatron.core.extensions.transformer_engine": (
        "Fp8Padding Fp8Unpadding SplitAlongDim TEActivationOp TEColumnParallelGroupedLinear TECudaRNGStatesTracker "
        "TEDelayedScaling TEFusedMLP TEFusedMLPWithGroupedLinear TEFusedResidualRMSNorm TEGroupedLinear "
        "TELMHeadColumnParallelLinear TELinear TEQuantizationParams TEQuantizationRecipe TERowParallelGroupedLinear "
        "TransformerEngineConfigType condition_init_method current_te_version fused_apply_rotary_pos_emb "
        "fused_apply_rotary_pos_emb_thd fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_permute "
        "fused_permute_and_pad_with_probs fused_permute_with_probs fused_sort_chunks_by_index "
        "fused_sort_chunks_by_index_with_probs fused_topk_with_score_function fused_unpermute "
        "get_cpu_offload_context set_save_original_input split_te_layernorm_column_parallel_linear te_checkpoint "
        "te_general_gemm te_parallel_cross_entropy"
    ),
    "megatron.core.fusions.fused_bias_dropout": (
        "bias_dropout_add_fused_inference bias_dropout_add_fused_train bias_dropout_add_unfused"
    ),
    "megatron.core.models.T5.t5_model": "T5LMHead t5_extended_attention_mask t5_position_ids",
    "megatron.core.models.T5.t5_spec": (
        "LNImpl decoder_model_with_local_spec decoder_model_with_transformer_engine_default_spec "
        "encoder_model_with_local_spec encoder_model_with_transformer_engine_default_spec"
    ),
    "megatron.core.models.bert.bert_layer_specs": (
        "LNImpl get_bert_layer_with_transformer_engine_spec get_bert_layer_with_transformer_engine_submodules"
    ),
    "megatron.core.models.common.embeddings": "MultimodalRotaryEmbedding YarnRotaryEmbedding apply_rotary_pos_emb",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": (
        "MultimodalRotaryEmbedding apply_rotary_pos_emb apply_rotary_pos_emb_bshd apply_rotary_pos_emb_thd "
        "get_pos_emb_on_this_cp_rank"
    ),
    "megatron.core.models.gpt.gpt_layer_specs": (
        "LNImpl get_gpt_layer_local_submodules get_gpt_layer_with_inference_spec "
        "get_gpt_layer_with_inference_submodules get_gpt_layer_with_transformer_engine_submodules "
        "get_gpt_mtp_block_spec get_gpt_mtp_block_spec_for_backend get_mlp_module_spec "
        "get_mlp_module_spec_for_backend gpt_layer_local_spec_moe gpt_layer_with_transformer_engine_spec_moe"
    ),
    "megatron.core.optimizer": (
        "AdamOptimizerConfig ChainedOptimizer ConstantGradScaler DistributedOptimizer DynamicGradScaler "
        "FP32Optimizer Float16OptimizerWithFloat16Params GradCommProcessGroups HybridDeviceOptimizer "
        "LayerWiseDistributedOptimizer ModelCommProcessGroups ParamAndGradBuffer ParamGroupOverride ParamKey "
        "ParamPredicate ParamWithNamePredicate ProcessGroupCollection SGDOptimizerConfig USING_PYTORCH_OPTIMIZER "
        "check_config_overrides_consistency combine_param_group_overrides get_global_unique_param_name "
        "get_mup_config_overrides get_pg_rank get_pg_size get_standard_config_overrides "
        "is_managed_by_layer_wise_optimizer is_te_min_version log_single_rank parallel_state "
        "param_group_identifier_keys param_group_override_to_tuple"
    ),
    "megatron.core.optimizer.cpu_offloading": "HybridDeviceOptimizer",
    "megatron.core.optimizer.optimizer_config": (
        "AdamOptimizerConfig ParamKey ParamPredicate ParamWithNamePredicate SGDOptimizerConfig"
    ),
    "megatron.core.optimizer_param_scheduler": (
        "ParamGroupOverride combine_param_group_overrides get_canonical_lr_for_logging param_group_override_to_tuple"
    ),
    "megatron.core.parallel_state": (
        "RankGenerator create_all_gather_groups create_group create_hierarchical_groups "
        "create_hierarchical_parallel_groups create_hybrid_dp_cp_groups default_embedding_ranks "
        "default_position_embedding_ranks destroy_global_memory_buffer destroy_global_symmetric_memory_buffer "
        "generate_masked_orthogonal_rank_groups get_all_ranks get_expert_gtp_weight_remat_global_ranks "
        "get_expert_gtp_weight_remat_group get_expert_gtp_weight_remat_rank get_expert_gtp_weight_remat_world_size "
        "get_global_symmetric_memory_buffer get_gtp_weight_remat_global_ranks get_gtp_weight_remat_group "
        "get_gtp_weight_remat_rank get_gtp_weight_remat_world_size get_hybrid_data_context_parallel_groups "
        "get_inter_distributed_optimizer_instance_group get_inter_partial_data_parallel_group "
        "get_intra_distributed_optimizer_instance_group get_nccl_options get_pipeline_model_parallel_decoder_start "
        "has_separate_all_gather_group is_inside_decoder is_inside_encoder is_pipeline_stage_at_split "
        "overwrite_nccl_comm_cfgs set_pipeline_model_parallel_split_rank update_pg_timeout"
    ),
    "megatron.core.pipeline_parallel.schedules": (
        "Shape backward_step backward_step_multimodule check_first_val_step clear_embedding_activation_buffer "
        "convert_schedule_table_to_order custom_backward finish_embedding_wgrad_compute forward_step "
        "forward_step_calc_loss get_pp_rank_microbatches get_schedule_table get_tensor_device "
        "get_tensor_shapes recv_backward recv_forward send_backward send_backward_recv_forward send_forward "
        "send_forward_recv_backward set_current_microbatch"
    ),
    "megatron.core.tensor_parallel": (
        "CheckpointWithoutOutput InferenceColumnParallelLinear InferenceLayerNormColumnParallelLinear "
        "InferenceRowParallelLinear all_gather_last_dim_from_tensor_parallel_region all_to_all_hp2sp "
        "all_to_all_sp2hp convert_cuda_rng_state copy_gtp_attributes copy_tensor_model_parallel_attributes "
        "gather_from_sequence_parallel_region_to_moe get_data_parallel_rng_tracker_name "
        "get_expert_parallel_rng_tracker_name is_graph_safe_cuda_rng_tracker "
        "linear_with_grad_accumulation_and_async_allreduce param_is_not_gtp_duplicate "
        "param_is_not_tensor_parallel_duplicate reduce_scatter_last_dim_to_tensor_parallel_region "
        "reduce_scatter_to_sequence_parallel_region_from_moe "
        "set_defaults_if_not_set_tensor_model_parallel_attributes set_tensor_model_parallel_attributes"
    ),
    "megatron.core.tensor_parallel.cross_entropy": "VocabParallelCrossEntropy",
    "megatron.core.tensor_parallel.layers": (
        "LinearWithFrozenWeight LinearWithGradAccumulationAndAsyncCommunication copy_gtp_attributes "
        "copy_tensor_model_parallel_attributes custom_bwd custom_fwd dist_all_gather_func "
        "dist_reduce_scatter_func linear_with_frozen_weight linear_with_grad_accumulation_and_async_allreduce "
        "param_is_not_gtp_duplicate param_is_not_tensor_parallel_duplicate "
        "set_defaults_if_not_set_tensor_model_parallel_attributes set_tensor_model_parallel_attributes"
    ),
    "megatron.core.tensor_parallel.mappings": (
        "all_gather_last_dim_from_tensor_parallel_region all_to_all_hp2sp all_to_all_sp2hp dist_all_gather_func "
        "dist_reduce_scatter_func gather_from_sequence_parallel_region_to_moe "
        "reduce_scatter_last_dim_to_tensor_parallel_region reduce_scatter_to_sequence_parallel_region_from_moe"
    ),
    "megatron.core.tensor_parallel.random": (
        "CheckpointFunction CheckpointWithoutOutput CheckpointWithoutOutputFunction convert_cuda_rng_state "
        "dist_all_gather_func get_all_rng_states get_data_parallel_rng_tracker_name "
        "get_expert_parallel_rng_tracker_name get_gtp_remat_rng_tracker_name initialize_rng_tracker "
        "is_checkpointing is_graph_safe_cuda_rng_tracker"
    ),
    "megatron.core.timers": "dist_all_gather_func DummyTimer TimerBase",
    "megatron.core.tokenizers": "MegatronTokenizerBase",
    "megatron.core.transformer": "MLATransformerConfig",
    "megatron.core.transformer.attention": (
        "Attention CoreAttentionBuilder CoreAttentionInterface LinearInterface LinearLayer LinearLayerBuilder "
        "LinearProjBuilder LinearProjInterface LinearQkv LinearQkvBuilder LinearQkvInterface SplitAlongDim"
    ),
    "megatron.core.transformer.enums": "CudaGraphModule CudaGraphScope InferenceCudaGraphScope",
    "megatron.core.transformer.mlp": (
        "LinearFc1Builder LinearFc1Interface LinearFc2Builder LinearFc2Interface TEActivationFunctionBuilder "
        "TEActivationFunctionInterface apply_swiglu_sharded_factory"
    ),
    "megatron.core.models.gpt.moe_module_specs": (
        "get_inference_optimized_moe_spec get_moe_module_spec get_moe_module_spec_for_backend"
    ),
    "megatron.core.transformer.moe.experts": (
        "GRAD_INPUT_BUFFER_KEY GroupedLinearFc1Builder GroupedLinearFc1Interface GroupedLinearFc2Builder "
        "GroupedLinearFc2Interface GroupedMLP GroupedMLPSubmodules InferenceGroupedMLP OUTPUT_BUFFER_KEY SequentialMLP "
        "TEGroupedMLP expert_dist_ckpt_decorator te"
    ),
    "megatron.core.transformer.moe.legacy_a2a_token_dispatcher": "MoEAlltoAllSEQTokenDispatcher",
    "megatron.core.transformer.moe.moe_layer": (
        "BaseMoELayer ExpertsBuilder ExpertsInterface MoELayer MoESubmodules RouterBuilder RouterInterface "
        "SharedExpertsBuilder SharedExpertsInterface"
    ),
    "megatron.core.transformer.moe.moe_logging": (
        "MetricEntry MoEMetricsTracker destroy_moe_metrics_tracker get_moe_metrics_tracker set_moe_metrics_tracker"
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "MoECudaGraphPartialCaptureSignal MoECudaGraphTensorStore RandomSTE RandomSTEShared "
        "RouterGatingLinearFunction aggregate_aux_losses_tracker_across_pipeline_parallel apply_biased_logits "
        "apply_random_logits get_align_size_for_quantization get_aux_losses_tracker get_default_model_comm_pgs "
        "get_default_pg_collection get_tokens_per_expert_and_token_count maybe_move_tensor_to_cpu "
        "maybe_skip_or_early_return_by_cudagraph moe_gather moe_scatter pad_routing_map permute "
        "permute_with_padded_tokens qb_dual_update router_gating_linear sequence_load_balancing_loss_func "
        "skip_routed_expert_padding sort_chunks_by_idxs topk_softmax_with_capacity unpermute "
        "unpermute_with_padded_tokens"
    ),
    "megatron.core.transformer.moe.router": "InferenceTopKRouter Router TopKRouter",
    "megatron.core.transformer.moe.router_replay": "RouterReplay RouterReplayAction",
    "megatron.core.transformer.moe.shared_experts": (
        "FusedSharedExpertMLP SharedExpertMLP SharedExpertState overlap_state_check set_tensor_grad_fn_sequence_sr te"
    ),
    "megatron.core.transformer.moe.token_dispatcher": (
        "MoEAllGatherTokenDispatcher MoEAlltoAllTokenDispatcher MoEDroplessTokenDispatcher MoEFlexTokenDispatcher "
        "MoETokenDispatcher"
    ),
    "megatron.core.transformer.moe.upcycling_utils": (
        "ActivationFuncName ExpertsType load_and_upcycle_model upcycle_state_dict"
    ),
    "megatron.core.transformer.module": (
        "GraphableMegatronModule conversion_helper float16_to_fp32 fp32_to_float16 param_is_not_shared"
    ),
    "megatron.core.transformer.torch_norm": "L2Norm LayerNormBuilder LayerNormInterface",
    "megatron.core.transformer.transformer_block": (
        "LayerNormImpl get_cpu_offload_context get_num_layers_to_build te_checkpoint"
    ),
    "megatron.core.transformer.transformer_config": "MLATransformerConfig",
    "megatron.core.transformer.transformer_layer": (
        "BaseTransformerLayer MlpBuilder MlpInterface MoETransformerLayer get_transformer_layer_offset"
    ),
    "megatron.core.transformer.utils": (
        "attention_mask_func cat_with_oom_fallback cuda_graph_attr_cache ensure_metadata_has_dp_cp_group "
        "erf_gelu gelu_impl get_default_causal_mask get_linear_layer get_sliding_window_causal_mask "
        "init_cuda_graph_cache is_layer_window_attention make_sharded_object_for_checkpoint openai_gelu "
        "set_model_to_sequence_parallel sharded_state_dict_default toggle_cuda_graphs "
        "transition_moe_cudagraphs"
    ),
    "megatron.core.utils": (
        "ExperimentalNotEnabledError GlobalSymmetricMemoryBuffer MakeViewlessTensor accepts_parameter "
        "check_param_hashes_across_dp_replicas configure_nvtx_profiling deprecate_args deprecated "
        "dist_all_gather_func drain_embedding_wgrad_compute experimental_api experimental_cls experimental_fn "
        "get_asyncio_loop get_batch_on_this_hybrid_cp_rank get_causal_conv1d_version "
        "get_data_parallel_group_if_dtensor get_fa_version get_flashinfer_version get_full_tensor_if_necessary "
        "get_mamba_inference_state_config_from_model get_mamba_version get_model_type get_model_xattn get_pg_rank "
        "get_pg_size get_pg_src_rank get_pretrain_batch_on_this_cp_rank get_sft_batch_on_this_cp_rank "
        "get_tensor_model_parallel_group_if_none get_thd_batch_on_this_cp_rank internal_api "
        "is_causal_conv1d_min_version is_fa_min_version is_flashinfer_min_version is_mamba_min_version is_submodule "
        "is_using_quantization_scales local_multi_tensor_applier local_multi_tensor_l2_norm local_multi_tensor_scale "
        "log_on_each_pipeline_stage log_single_rank mup_scaled_init_method_normal null_decorator nvtx_decorator "
        "prepare_input_tensors_for_wgrad_compute round_up_to_nearest_multiple to_local_if_dtensor "
        "trace_async_exceptions"
    ),
    "megatron.core.model_parallel_config": "resolve_tensor_parallel_weight_shards",
    "megatron.core.rerun_state_machine": (
        "COMPARISON_MATCH COMPARISON_MISMATCH Call Caller DataIteratorArgType "
        "EXIT_CODE_FAILED_ON_RESULT_VALIDATION EXIT_CODE_RESUME_TO_DISAMBIGUATE QuickStats RerunDataIterator "
        "RerunDiagnostic RerunErrorInjector RerunState RerunValidationStatus SerializableStateType "
        "destroy_rerun_state_machine initialize_rerun_state_machine"
    ),
    "megatron.core.tokenizers.megatron_tokenizer": (
        "TEXT_LIBRARIES TOKENIZER_LIBRARIES TOKENIZER_MAPPING_NAMES VISION_LIBRARIES"
    ),
    "megatron.core.tokenizers.utils.build_tokenizer": "MEGATRON_TOKENIZERS SP_TOKENIZERS SUPPORTED_TOKENIZERS",
    "megatron.core.transformer.multi_token_prediction": (
        "LNImpl MTPLossAutoScaler MTPLossLoggingHelper MultiTokenPredictionBlock "
        "MultiTokenPredictionBlockSubmodules MultiTokenPredictionLayer MultiTokenPredictionLayerSubmodules "
        "SUPPORTED_ATTN_MASK TESpecProvider dist_all_gather_func get_mtp_layer_offset get_mtp_layer_spec "
        "get_mtp_layer_spec_for_backend get_mtp_num_layers_to_build process_mtp_loss roll_tensor "
        "tie_output_layer_state_dict tie_word_embeddings_state_dict"
    ),
    "megatron.core.transformer.spec_utils": "get_submodules",
    "megatron.core.datasets.megatron_dataset": "MockDataset",
    "megatron.core.num_microbatches_calculator": (
        "StepBatchsizeNumMicroBatchesCalculator build_num_microbatches_calculator reconfigure_microbatch_calculator"
    ),
    "megatron.core.process_groups_config": (
        "GradFinalizeProcessGroups MultiModuleProcessGroupCollection ProcessGroupHelperMeta"
    ),
    "megatron.core.tokenizers.text": "MegatronTokenizerText",
    "megatron.core.tokenizers.text.utils.build_tokenizer": "MEGATRON_TOKENIZERS SP_TOKENIZERS",
}


def reason_of(module: str) -> str:
    """Return the reason why names of a module are not built: that of the module, or of the package around it."""
    while module not in REASONS:
        module = module.rpartition(".")[0]
    return REASONS[module]
