"""Names that Megatron has, or had once, outside of `megatron.core`: defined elsewhere here, or not built.

The flat paths (`megatron.model`, `megatron.mpu`) are the oldest; `megatron.legacy` and `megatron.training` took their place.
`moved_or_unbuilt_megatron_names` adds the names of the core, and says what the tables mean.
"""

from collections.abc import Mapping

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "megatron.legacy.model.fused_bias_gelu": {"megatron.core.fusions.megatron_activation_functions": "bias_gelu_impl"},
    "megatron.model.fused_bias_gelu": {"megatron.core.fusions.megatron_activation_functions": "bias_gelu_impl"},
    "megatron.training.activations": {
        "megatron.core.fusions.megatron_activation_functions": "fast_gelu quick_gelu squared_relu"
    },
    "megatron.training.tokenizer.tokenizer": {
        "megatron.core.tokenizers.utils.build_tokenizer": "_vocab_size_with_padding"
    },
    "megatron": {
        "megatron.core.num_microbatches_calculator": "get_current_global_batch_size get_num_microbatches update_num_microbatches",
        "megatron.training.initialize": "initialize_megatron",
    },
    "megatron.global_vars": {
        "megatron.core.num_microbatches_calculator": "get_current_global_batch_size get_num_microbatches update_num_microbatches",
        "megatron.core.timers": "Timers",
        "megatron.training.global_vars": "get_args get_timers get_tokenizer",
    },
    "megatron.initialize": {"megatron.training.initialize": "initialize_megatron"},
    "megatron.legacy.data.dataset_utils": {"megatron.data.dataset_utils": "build_train_valid_test_datasets"},
    "megatron.legacy.model.enums": {
        "megatron.core.enums": "ModelType",
        "megatron.core.transformer.enums": "AttnMaskType AttnType LayerType",
    },
    "megatron.legacy.model.module": {"megatron.core.transformer.module": "MegatronModule"},
    "megatron.legacy.model.transformer": {
        "megatron.core.transformer": "ParallelAttention ParallelMLP ParallelTransformer ParallelTransformerLayer"
    },
    "megatron.legacy.model.utils": {
        "megatron.core.utils": "init_method_normal scaled_init_method_normal",
        "megatron.core.fusions.megatron_activation_functions": "erf_gelu gelu_impl openai_gelu",
    },
    "megatron.model": {"megatron.core.distributed": "DistributedDataParallel", "megatron.core.enums": "ModelType"},
    "megatron.model.bert_model": {"megatron.legacy.model.bert_model": "BertModel"},
    "megatron.model.distributed": {"megatron.core.distributed": "DistributedDataParallel MemoryBuffer"},
    "megatron.model.enums": {
        "megatron.core.enums": "ModelType",
        "megatron.core.transformer.enums": "AttnMaskType AttnType LayerType",
    },
    "megatron.model.gpt_model": {"megatron.legacy.model.gpt_model": "GPTModel"},
    "megatron.model.language_model": {
        "megatron.core.models.common.embeddings.embedding": "Embedding",
        "megatron.core.models.common.language_model": "TransformerLanguageModel",
    },
    "megatron.model.module": {
        "megatron.core.transformer.module": "MegatronModule",
        "megatron.legacy.model.module": "Float16Module",
    },
    "megatron.model.t5_model": {"megatron.legacy.model.t5_model": "T5Model"},
    "megatron.model.transformer": {
        "megatron.core.transformer": "ParallelAttention ParallelMLP ParallelTransformer ParallelTransformerLayer",
        "megatron.legacy.model.language_model": "get_num_layers",
    },
    "megatron.model.utils": {
        "megatron.core.utils": "init_method_normal scaled_init_method_normal",
        "megatron.core.fusions.megatron_activation_functions": "erf_gelu gelu_impl openai_gelu",
    },
    "megatron.mpu.cross_entropy": {"megatron.core.tensor_parallel": "vocab_parallel_cross_entropy"},
    "megatron.mpu.data": {"megatron.core.tensor_parallel": "broadcast_data"},
    "megatron.mpu.initialize": {
        "megatron.core.parallel_state": (
            "_DATA_PARALLEL_GROUP _EMBEDDING_GROUP _MODEL_PARALLEL_GROUP _PIPELINE_MODEL_PARALLEL_GROUP "
            "_TENSOR_MODEL_PARALLEL_GROUP destroy_model_parallel get_data_parallel_group get_data_parallel_rank "
            "get_data_parallel_world_size get_embedding_group get_model_parallel_group "
            "get_pipeline_model_parallel_first_rank get_pipeline_model_parallel_group "
            "get_pipeline_model_parallel_last_rank get_pipeline_model_parallel_next_rank "
            "get_pipeline_model_parallel_prev_rank get_pipeline_model_parallel_rank "
            "get_pipeline_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank "
            "get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size "
            "get_virtual_pipeline_model_parallel_rank get_virtual_pipeline_model_parallel_world_size "
            "initialize_model_parallel is_pipeline_first_stage is_pipeline_last_stage is_unitialized "
            "model_parallel_is_initialized set_pipeline_model_parallel_rank set_pipeline_model_parallel_world_size "
            "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size set_virtual_pipeline_model_parallel_rank"
        ),
        "megatron.legacy.model.language_model": "get_num_layers",
    },
    "megatron.mpu.layers": {
        "megatron.core.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding"
    },
    "megatron.mpu.mappings": {
        "megatron.core.tensor_parallel": (
            "copy_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
            "reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region"
        )
    },
    "megatron.mpu.random": {
        "megatron.core.tensor_parallel": (
            "CudaRNGStatesTracker checkpoint gather_split_1d_tensor get_cuda_rng_tracker model_parallel_cuda_manual_seed "
            "split_tensor_into_1d_equal_chunks"
        )
    },
    "megatron.mpu.utils": {
        "megatron.core.tensor_parallel": "VocabUtility divide split_tensor_along_last_dim",
        "megatron.core.utils": "ensure_divisibility",
    },
    "megatron.optimizer": {
        "megatron.core.optimizer": "MegatronOptimizer get_megatron_optimizer",
        "megatron.training.global_vars": "get_args",
    },
    "megatron.optimizer.optimizer": {"megatron.core.optimizer": "MegatronOptimizer"},
    "megatron.optimizer_param_scheduler": {"megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler"},
    "megatron.schedules": {
        "megatron.core.pipeline_parallel.schedules": (
            "forward_backward_no_pipelining forward_backward_pipelining_with_interleaving "
            "forward_backward_pipelining_without_interleaving get_forward_backward_func"
        )
    },
    "megatron.text_generation.forward_step": {"megatron.core.inference_params": "InferenceParams"},
    "megatron.timers": {"megatron.core.timers": "Timers"},
    "megatron.tokenizer": {"megatron.training.tokenizer.tokenizer": "build_tokenizer"},
    "megatron.tokenizer.tokenizer": {
        "megatron.core.tokenizers.utils.build_tokenizer": "_vocab_size_with_padding",
        "megatron.training.tokenizer.tokenizer": "build_tokenizer",
    },
    "megatron.training.argument_utils": {
        "megatron.legacy.model.gpt_model_provider_from_args": "GPTModelConfig gpt_config_from_args",
        "megatron.training.arguments": "core_transformer_config_from_args",
    },
    "megatron.training.checkpointing": {"megatron.training.global_vars": "print_rank_0"},
    "megatron.training.config": {"megatron.training.argument_utils": "PretrainConfigContainer"},
    "megatron.training.config.container": {"megatron.training.argument_utils": "PretrainConfigContainer"},
    "megatron.training.models": {"megatron.legacy.model.gpt_model_provider_from_args": "GPTModelConfig"},
    "megatron.training.models.gpt": {"megatron.legacy.model.gpt_model_provider_from_args": "GPTModelConfig"},
    "megatron.training.optimizer_param_scheduler": {
        "megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler"
    },
    "megatron.training.training": {"megatron.training.build_model_optimizer_and_data": "get_model"},
}
REASONS: Mapping[str, str] = {
    "megatron": "docs/coming_from_megatron.md says what takes its place",
    "megatron.arguments": "flags are parsed and checked by initialize_megatron",
    "megatron.checkpointing": (
        "a run saves by --save and loads by --load; a loop of your own by megatron.core.dist_checkpointing.save and "
        "load (docs/coming_from_megatron.md)"
    ),
    "megatron.data": (
        "data sets are those of megatron.core.datasets, or of your own from the script's provider "
        "(docs/adding_a_model.md)"
    ),
    "megatron.data.autoaugment": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.biencoder_dataset_utils": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.ict_dataset": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.image_folder": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.indexed_dataset": (
        "token files are read by megatron.core.datasets.indexed_dataset.IndexedDataset, and written by "
        "tools/preprocess_data.py or megatron.core.datasets.indexed_dataset_writer.IndexedDatasetWriter"
    ),
    "megatron.data.multimodal_dataset": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.orqa_wiki_dataset": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.realm_dataset_utils": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.realm_index": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.data.vit_dataset": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.dist_signal_handler": "a run saves and ends at a signal by --exit-signal-handler (docs/reliability.md)",
    "megatron.energon": (
        "the package megatron-energon, which loads pictures and texts, is not used; data sets are those of "
        "megatron.core.datasets, or of your own from the script's provider (docs/adding_a_model.md)"
    ),
    "megatron.fp16_deprecated": "loss scales are set by --loss-scale and --initial-loss-scale; nothing here unpickles",
    "megatron.global_vars": "a run is read by get_args, get_tokenizer and get_timers, and ended by its end",
    "megatron.indexer": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.inference": "text is generated by tools/generate.py (docs/generation.md)",
    "megatron.initialize": "initialize_megatron sets everything up",
    "megatron.learning_rates": "use megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
    "megatron.legacy.data": (
        "data sets are those of megatron.core.datasets, or of your own from the script's provider "
        "(docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.autoaugment": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.biencoder_dataset_utils": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.ict_dataset": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.image_folder": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.multimodal_dataset": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.orqa_wiki_dataset": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.realm_dataset_utils": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.realm_index": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.data.vit_dataset": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.fp16_deprecated": "loss scales are set by --loss-scale and --initial-loss-scale; nothing here unpickles",
    "megatron.legacy.indexer": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.model": (
        "legacy models are GPTModel, BertModel and T5Model; build others from megatron.core.models"
    ),
    "megatron.legacy.model.biencoder_model": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.classification": (
        "heads for tasks are not built; fine-tune by finetune_gpt.py, or write a model of your own "
        "(docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.fused_bias_gelu": "fused operations are chosen by --compile",
    "megatron.legacy.model.fused_layer_norm": "norms are chosen by --normalization",
    "megatron.legacy.model.fused_softmax": (
        "attention is computed by megatron.core.transformer.dot_product_attention.DotProductAttention"
    ),
    "megatron.legacy.model.multiple_choice": (
        "heads for tasks are not built; fine-tune by finetune_gpt.py, or write a model of your own "
        "(docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.realm_model": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.rms_norm": "norms are chosen by --normalization",
    "megatron.legacy.model.transformer": (
        "layers are built from TransformerConfig and specs, or are modules of your own (docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.utils": (
        "layers are built from TransformerConfig and specs, or are modules of your own (docs/adding_a_model.md)"
    ),
    "megatron.legacy.model.vision": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.log_handler": "what a run prints is set by --log-interval and --tensorboard-dir (docs/watching.md)",
    "megatron.memory": "memory is kept by torch; its use is predicted by tools/estimate_memory.py",
    "megatron.microbatches": "use megatron.core.num_microbatches_calculator",
    "megatron.model": (
        "layers are built from TransformerConfig and specs, or are modules of your own (docs/adding_a_model.md)"
    ),
    "megatron.model.biencoder_model": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.model.classification": (
        "heads for tasks are not built; fine-tune by finetune_gpt.py, or write a model of your own "
        "(docs/adding_a_model.md)"
    ),
    "megatron.model.fused_bias_gelu": "fused operations are chosen by --compile",
    "megatron.model.fused_layer_norm": "norms are chosen by --normalization",
    "megatron.model.fused_softmax": (
        "attention is computed by megatron.core.transformer.dot_product_attention.DotProductAttention"
    ),
    "megatron.model.multiple_choice": (
        "heads for tasks are not built; fine-tune by finetune_gpt.py, or write a model of your own "
        "(docs/adding_a_model.md)"
    ),
    "megatron.model.realm_model": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.model.retro_transformer": (
        "there are no models of retrieval here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.model.rms_norm": "norms are chosen by --normalization",
    "megatron.model.vision": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.model.vit_model": (
        "there are no models of images here; a model of your own is trained by pretrain (docs/adding_a_model.md)"
    ),
    "megatron.mpu": (
        "groups are asked of megatron.core.parallel_state, and split layers are those of megatron.core.tensor_parallel"
    ),
    "megatron.optimizer": "get_megatron_optimizer makes the optimizer (docs/optimizers.md)",
    "megatron.p2p_communication": (
        "a step runs by get_forward_backward_func(); its schedule is a list of actions (docs/schedules.md)"
    ),
    "megatron.schedules": (
        "a step runs by get_forward_backward_func(); its schedule is a list of actions (docs/schedules.md)"
    ),
    "megatron.text_generation": "text is generated by tools/generate.py (docs/generation.md)",
    "megatron.text_generation_server": "text is generated by tools/generate.py (docs/generation.md); there is no server",
    "megatron.text_generation_utils": "text is generated by tools/generate.py (docs/generation.md)",
    "megatron.timers": "Timers makes the timers of a run",
    "megatron.tokenizer": "tokenizers are built by build_tokenizer (docs/data_preparation.md)",
    "megatron.training": (
        "the loop is pretrain(), whose steps are observed by flags (docs/training_run.md); a loop of your own uses "
        "get_forward_backward_func"
    ),
    "megatron.training.arguments": "flags are parsed and checked by initialize_megatron",
    "megatron.training.async_utils": "saves beside training are asked for by --async-save",
    "megatron.training.checkpointing": (
        "a run saves by --save and loads by --load; a loop of your own by megatron.core.dist_checkpointing.save and "
        "load (docs/coming_from_megatron.md)"
    ),
    "megatron.training.datasets": (
        "train on token files (--data-path), also with --fim-data; prepare chats with tools/preprocess_data.py"
    ),
    "megatron.training.datasets.sft_dataset": (
        "with --sft call megatron.core.datasets.sft_dataset.build_sft_datasets, as pretrain_gpt.py does, which packs "
        "and blends the examples of --data-path"
    ),
    "megatron.training.dgrad_logging": "gradients are observed by the flags of docs/watching.md",
    "megatron.training.dist_signal_handler": "a run saves and ends at a signal by --exit-signal-handler (docs/reliability.md)",
    "megatron.training.distillation": "there is no distillation; leave out --logits-load-dir",
    "megatron.training.ft_integration": "failures are watched by the run itself (docs/reliability.md)",
    "megatron.training.global_vars": "a run is read by get_args, get_tokenizer and get_timers, and ended by its end",
    "megatron.training.initialize": "initialize_megatron sets everything up",
    "megatron.training.log_handler": "what a run prints is set by --log-interval and --tensorboard-dir (docs/watching.md)",
    "megatron.training.one_logger_utils": "a run writes TensorBoard files and a JSON log (docs/watching.md)",
    "megatron.training.theoretical_memory_usage": "memory is predicted by tools/estimate_memory.py (docs/memory.md)",
    "megatron.training.tokenizer": "tokenizers are built by build_tokenizer (docs/data_preparation.md)",
    "megatron.training.utils": "it serves parts of Megatron's loop; the loop here is pretrain()",
    "megatron.training.wandb_utils": "a run writes TensorBoard files and a JSON log (docs/watching.md)",
}
NOT_BUILT: Mapping[str, str] = {
    "megatron": ("get_adlr_autoresume get_retro_args get_signal_handler get_tensorboard_writer get_wandb_writer"),
    "megatron.arguments": "validate_args",
    "megatron.checkpointing": (
        "check_checkpoint_args ensure_directory_exists find_checkpoint_rank_0 fix_query_key_value_ordering "
        "get_checkpoint_name get_checkpoint_names get_checkpoint_tracker_filename get_checkpoint_version "
        "get_distributed_optimizer_checkpoint_name get_rng_state load_args_from_checkpoint load_biencoder_checkpoint "
        "load_checkpoint read_metadata save_checkpoint set_checkpoint_version"
    ),
    "megatron.data.autoaugment": "ImageNetPolicy SubPolicy",
    "megatron.data.bert_dataset": "BertDataset build_training_sample pad_and_convert_to_numpy",
    "megatron.data.biencoder_dataset_utils": (
        "BlockSampleData BlockSamplesMapping get_block_samples_mapping get_ict_batch get_one_epoch_dataloader "
        "join_str_list make_attention_mask"
    ),
    "megatron.data.blendable_dataset": "BlendableDataset",
    "megatron.data.data_samplers": (
        "MegatronPretrainingRandomSampler MegatronPretrainingSampler RandomSeedDataset build_pretraining_data_loader"
    ),
    "megatron.data.dataset_utils": (
        "build_dataset build_train_valid_test_datasets_with_prefixes compile_helper create_masked_lm_predictions "
        "create_tokens_and_tokentypes get_a_and_b_segments get_datasets_weights_and_num_samples get_indexed_dataset_ "
        "get_samples_mapping get_train_valid_test_split_ is_start_piece pad_and_convert_to_numpy truncate_segments"
    ),
    "megatron.data.gpt_dataset": "GPTDataset build_dataset get_indexed_dataset_",
    "megatron.data.ict_dataset": "ICTDataset get_ict_dataset make_attention_mask",
    "megatron.data.image_folder": (
        "DatasetFolder ImageFolder accimage_loader default_loader has_file_allowed_extension is_image_file "
        "make_dataset pil_loader"
    ),
    "megatron.data.indexed_dataset": (
        "IndexedCachedDataset IndexedDataset IndexedDatasetBuilder MMapIndexedDataset MMapIndexedDatasetBuilder "
        "create_doc_idx data_file_path dataset_exists get_available_dataset_impl index_file_path infer_dataset_impl "
        "make_builder make_dataset read_longs write_longs"
    ),
    "megatron.data.multimodal_dataset": "MultiModalDataset",
    "megatron.data.orqa_wiki_dataset": (
        "OpenRetrievalEvidenceDataset build_sample build_tokens_types_paddings_from_ids "
        "build_tokens_types_paddings_from_text get_open_retrieval_batch get_open_retrieval_wiki_dataset"
    ),
    "megatron.data.realm_dataset_utils": (
        "BlockSampleData BlockSamplesMapping get_block_samples_mapping get_ict_batch get_one_epoch_dataloader "
        "join_str_list"
    ),
    "megatron.data.realm_index": "FaissMIPSIndex OpenRetreivalDataStore detach",
    "megatron.data.t5_dataset": (
        "T5Dataset build_training_sample make_attention_mask make_attention_mask_3d make_history_mask "
        "make_history_mask_3d pad_and_convert_to_numpy"
    ),
    "megatron.data.vit_dataset": (
        "ClassificationTransform DinoTransform GaussianBlur InpaintingTransform Solarization build_train_valid_datasets"
    ),
    "megatron.dist_signal_handler": "DistributedSignalHandler all_gather_item get_device get_world_size",
    "megatron.fp16_deprecated.loss_scaler": "DynamicLossScaler LossScaler",
    "megatron.global_vars": (
        "get_adlr_autoresume get_retro_args get_signal_handler get_tensorboard_writer get_wandb_writer "
        "rebuild_tokenizer set_args set_global_variables set_retro_args"
    ),
    "megatron.indexer": "IndexBuilder",
    "megatron.inference.arguments": "add_modelopt_args",
    "megatron.inference.checkpointing": "load_modelopt_checkpoint load_modelopt_state",
    "megatron.inference.endpoints.common": "send_do_beam_search send_do_generate",
    "megatron.inference.endpoints.completions": "MegatronCompletions detokenize",
    "megatron.inference.gpt.model_provider": "model_provider",
    "megatron.inference.text_generation": "beam_search_and_post_process generate generate_and_post_process",
    "megatron.inference.text_generation.api": "beam_search beam_search_and_post_process generate generate_and_post_process",
    "megatron.inference.text_generation.beam_utils": "BeamHypotheses",
    "megatron.inference.text_generation.communication": (
        "broadcast_float_list broadcast_from_last_pipeline_stage broadcast_from_last_to_first_pipeline_stage "
        "broadcast_int_list broadcast_list broadcast_tensor copy_from_last_to_first_pipeline_stage "
        "recv_from_prev_pipeline_rank_ send_to_next_pipeline_rank"
    ),
    "megatron.inference.text_generation.forward_step": "ForwardStep",
    "megatron.inference.text_generation.generation": (
        "beam_search_and_return_on_first_stage generate_tokens_probs_and_return_on_first_stage "
        "score_and_return_on_first_stage"
    ),
    "megatron.inference.text_generation.mcore_engine_server": "ModelInferenceWrapperServer run_mcore_engine",
    "megatron.inference.text_generation.sampling": "modify_logits_for_top_k_filtering modify_logits_for_top_p_filtering sample",
    "megatron.inference.text_generation.tokenization": "detokenize_generations tokenize_prompts",
    "megatron.inference.text_generation_server": "MegatronGenerate MegatronServer",
    "megatron.initialize": "set_jit_fusion_options write_args_to_tensorboard",
    "megatron.learning_rates": "AnnealingLR",
    "megatron.legacy.data.autoaugment": "ImageNetPolicy SubPolicy",
    "megatron.legacy.data.biencoder_dataset_utils": (
        "BlockSampleData BlockSamplesMapping get_block_samples_mapping get_ict_batch get_one_epoch_dataloader "
        "join_str_list make_attention_mask"
    ),
    "megatron.legacy.data.data_samplers": (
        "MegatronPretrainingRandomSampler MegatronPretrainingSampler RandomSeedDataset build_pretraining_data_loader"
    ),
    "megatron.legacy.data.dataset_utils": (
        "build_dataset build_train_valid_test_datasets_with_prefixes create_masked_lm_predictions "
        "create_tokens_and_tokentypes get_a_and_b_segments get_datasets_weights_and_num_samples get_indexed_dataset_ "
        "get_samples_mapping get_train_valid_test_split_ is_start_piece pad_and_convert_to_numpy truncate_segments"
    ),
    "megatron.legacy.data.ict_dataset": "ICTDataset get_ict_dataset make_attention_mask",
    "megatron.legacy.data.image_folder": (
        "DatasetFolder ImageFolder accimage_loader default_loader has_file_allowed_extension is_image_file "
        "make_dataset pil_loader"
    ),
    "megatron.legacy.data.multimodal_dataset": "MultiModalDataset",
    "megatron.legacy.data.orqa_wiki_dataset": (
        "OpenRetrievalEvidenceDataset build_sample build_tokens_types_paddings_from_ids "
        "build_tokens_types_paddings_from_text get_open_retrieval_batch get_open_retrieval_wiki_dataset"
    ),
    "megatron.legacy.data.realm_dataset_utils": (
        "BlockSampleData BlockSamplesMapping get_block_samples_mapping get_ict_batch get_one_epoch_dataloader "
        "join_str_list"
    ),
    "megatron.legacy.data.realm_index": "FaissMIPSIndex OpenRetreivalDataStore detach",
    "megatron.legacy.data.vit_dataset": (
        "ClassificationTransform DinoTransform GaussianBlur InpaintingTransform Solarization build_train_valid_datasets"
    ),
    "megatron.legacy.fp16_deprecated.loss_scaler": "DynamicLossScaler LossScaler",
    "megatron.legacy.indexer": "IndexBuilder",
    "megatron.legacy.model": "LayerNorm RMSNorm get_language_model",
    "megatron.legacy.model.bert_model": (
        "BertLMHead bert_extended_attention_mask bert_position_ids post_language_model_processing"
    ),
    "megatron.legacy.model.biencoder_model": "BiEncoderModel PretrainedBertModel biencoder_model_provider get_model_provider",
    "megatron.legacy.model.classification": "Classification",
    "megatron.legacy.model.fused_bias_gelu": "GeLUFunction bias_gelu bias_gelu_back",
    "megatron.legacy.model.fused_layer_norm": "MixedFusedLayerNorm",
    "megatron.legacy.model.fused_softmax": (
        "FusedScaleMaskSoftmax ScaledMaskedSoftmax ScaledSoftmax ScaledUpperTriangMaskedSoftmax"
    ),
    "megatron.legacy.model.gpt_model": "post_language_model_processing",
    "megatron.legacy.model.language_model": "Embedding Pooler TransformerLanguageModel get_language_model parallel_lm_logits",
    "megatron.legacy.model.module": "conversion_helper float16_to_fp32 fp32_to_float16 param_is_not_shared",
    "megatron.legacy.model.multiple_choice": "MultipleChoice",
    "megatron.legacy.model.realm_model": "ICTBertModel IREncoderBertModel general_ict_model_provider",
    "megatron.legacy.model.rms_norm": "RMSNorm",
    "megatron.legacy.model.t5_model": "T5LMHead t5_extended_attention_mask t5_position_ids",
    "megatron.legacy.model.transformer": (
        "CoreAttention DropPath FlashSelfAttention NoopTransformerLayer SwitchMLP bias_dropout_add "
        "bias_dropout_add_fused_inference bias_dropout_add_fused_train get_bias_dropout_add get_router_linear_layer "
        "sinkhorn"
    ),
    "megatron.legacy.model.utils": "attention_mask_func get_linear_layer get_norm",
    "megatron.legacy.model.vision.classification": "MitClassificationModel VitClassificationModel",
    "megatron.legacy.model.vision.dino": (
        "DINOHead DINOLoss DINOPretrainModel MultiCropWrapper cosine_scheduler get_student_backbone_and_num_features "
        "get_teacher_backbone_and_num_features"
    ),
    "megatron.legacy.model.vision.esvit_swin_backbone": (
        "BasicLayer Mlp PatchEmbed PatchMerging SwinTransformer SwinTransformerBlock WindowAttention get_swin "
        "window_partition window_reverse"
    ),
    "megatron.legacy.model.vision.inpainting": "MLP MitInpaintingModel VitInpaintingModel",
    "megatron.legacy.model.vision.knn_monitor": "build_data_loader compute_feature_bank get_feature_bank knn_predict",
    "megatron.legacy.model.vision.mit_backbone": (
        "Attention Block DWConv MixVisionTransformer Mlp OverlapPatchEmbed mit_b0 mit_b1 mit_b2 mit_b3 mit_b3_avg "
        "mit_b4 mit_b5 mit_b5_avg"
    ),
    "megatron.legacy.model.vision.swin_backbone": (
        "BasicLayer Mlp PatchEmbed PatchMerging SwinTransformer SwinTransformerBlock WindowAttention get_swin "
        "window_partition window_reverse"
    ),
    "megatron.legacy.model.vision.utils": "resize",
    "megatron.legacy.model.vision.vit_backbone": (
        "VitBackbone VitMlpHead isPerfectSquare twod_interpolate_position_embeddings_hook"
    ),
    "megatron.log_handler": "CustomHandler",
    "megatron.memory": "MemoryBuffer RingMemBuffer allocate_mem_buff get_mem_buff",
    "megatron.microbatches": (
        "ConstantNumMicroBatches NumMicroBatchesCalculator RampupBatchsizeNumMicroBatches "
        "build_num_microbatches_calculator"
    ),
    "megatron.model": "LayerNorm RMSNorm get_language_model",
    "megatron.model.bert_model": (
        "BertLMHead bert_extended_attention_mask bert_position_ids post_language_model_processing"
    ),
    "megatron.model.biencoder_model": "BiEncoderModel PretrainedBertModel biencoder_model_provider get_model_provider",
    "megatron.model.classification": "Classification",
    "megatron.model.distributed": "DistributedDataParallelBase",
    "megatron.model.fused_bias_gelu": "GeLUFunction bias_gelu bias_gelu_back",
    "megatron.model.fused_layer_norm": "FusedLayerNormAffineFunction MixedFusedLayerNorm",
    "megatron.model.fused_softmax": (
        "FusedScaleMaskSoftmax ScaledMaskedSoftmax ScaledSoftmax ScaledUpperTriangMaskedSoftmax"
    ),
    "megatron.model.gpt_model": "post_language_model_processing",
    "megatron.model.language_model": "Pooler get_language_model parallel_lm_logits",
    "megatron.model.module": "conversion_helper float16_to_fp32 fp32_to_float16 param_is_not_shared",
    "megatron.model.multiple_choice": "MultipleChoice",
    "megatron.model.realm_model": "ICTBertModel IREncoderBertModel general_ict_model_provider",
    "megatron.model.retro_transformer": (
        "DropPath ParallelAttention ParallelRetroEncoder ParallelRetroEncoderTransformerCALayer "
        "ParallelRetroTransformer ParallelRetroTransformerEncoderLayer ParallelRetroTransformerLayer "
        "ParallelTransformerLayer SwitchMLP bias_dropout_add bias_dropout_add_fused_inference "
        "bias_dropout_add_fused_train get_bias_dropout_add"
    ),
    "megatron.model.rms_norm": "RMSNorm",
    "megatron.model.rotary_pos_embedding": "RotaryEmbedding apply_rotary_pos_emb",
    "megatron.model.t5_model": "T5LMHead t5_extended_attention_mask t5_position_ids",
    "megatron.model.transformer": (
        "CoreAttention DropPath FlashSelfAttention NoopTransformerLayer SwitchMLP bias_dropout_add "
        "bias_dropout_add_fused_inference bias_dropout_add_fused_train get_bias_dropout_add get_router_linear_layer "
        "sinkhorn"
    ),
    "megatron.model.utils": "attention_mask_func get_linear_layer get_norm",
    "megatron.model.vision.classification": "MitClassificationModel VitClassificationModel",
    "megatron.model.vision.dino": (
        "DINOHead DINOLoss DINOPretrainModel MultiCropWrapper cosine_scheduler get_student_backbone_and_num_features "
        "get_teacher_backbone_and_num_features"
    ),
    "megatron.model.vision.esvit_swin_backbone": (
        "BasicLayer Mlp PatchEmbed PatchMerging SwinTransformer SwinTransformerBlock WindowAttention get_swin "
        "window_partition window_reverse"
    ),
    "megatron.model.vision.inpainting": "MLP MitInpaintingModel VitInpaintingModel",
    "megatron.model.vision.knn_monitor": "build_data_loader compute_feature_bank get_feature_bank knn_predict",
    "megatron.model.vision.mit_backbone": (
        "Attention Block DWConv MixVisionTransformer Mlp OverlapPatchEmbed mit_b0 mit_b1 mit_b2 mit_b3 mit_b3_avg "
        "mit_b4 mit_b5 mit_b5_avg"
    ),
    "megatron.model.vision.swin_backbone": (
        "BasicLayer Mlp PatchEmbed PatchMerging SwinTransformer SwinTransformerBlock WindowAttention get_swin "
        "window_partition window_reverse"
    ),
    "megatron.model.vision.utils": "resize",
    "megatron.model.vision.vit_backbone": "VitBackbone VitMlpHead isPerfectSquare twod_interpolate_position_embeddings_hook",
    "megatron.model.vit_model": "VitMlpHead VitModel twod_interpolate_position_embeddings_hook",
    "megatron.mpu": ("init_checkpointed_activations_memory_buffer reset_checkpointed_activations_memory_buffer"),
    "megatron.mpu.layers": (
        "copy_tensor_model_parallel_attributes param_is_not_tensor_parallel_duplicate "
        "set_defaults_if_not_set_tensor_model_parallel_attributes set_tensor_model_parallel_attributes"
    ),
    "megatron.mpu.random": (
        "CheckpointFunction init_checkpointed_activations_memory_buffer reset_checkpointed_activations_memory_buffer"
    ),
    "megatron.optimizer": (
        "Adam ConstantGradScaler DistributedOptimizer DynamicGradScaler FP32Optimizer "
        "Float16OptimizerWithFloat16Params LayerNorm SGD get_param_groups"
    ),
    "megatron.optimizer.clip_grads": "clip_grad_norm_fp32 count_zeros_fp32",
    "megatron.optimizer.distrib_optimizer": "DistributedOptimizer Range",
    "megatron.optimizer.grad_scaler": "ConstantGradScaler DynamicGradScaler MegatronGradScaler",
    "megatron.optimizer.optimizer": "FP32Optimizer Float16OptimizerWithFloat16Params MixedPrecisionOptimizer",
    "megatron.optimizer.utils": "shard_buffer",
    "megatron.p2p_communication": (
        "recv_backward recv_forward send_backward send_backward_recv_backward send_backward_recv_forward send_forward "
        "send_forward_backward_recv_forward_backward send_forward_recv_backward send_forward_recv_forward"
    ),
    "megatron.schedules": "backward_step dummy_handler forward_step",
    "megatron.text_generation": "beam_search_and_post_process generate generate_and_post_process",
    "megatron.text_generation.api": "beam_search beam_search_and_post_process generate generate_and_post_process",
    "megatron.text_generation.beam_utils": "BeamHypotheses",
    "megatron.text_generation.communication": (
        "broadcast_float_list broadcast_from_last_pipeline_stage broadcast_from_last_to_first_pipeline_stage "
        "broadcast_int_list broadcast_list broadcast_tensor copy_from_last_to_first_pipeline_stage "
        "recv_from_prev_pipeline_rank_ send_to_next_pipeline_rank"
    ),
    "megatron.text_generation.forward_step": "ForwardStep",
    "megatron.text_generation.generation": (
        "beam_search_and_return_on_first_stage generate_tokens_probs_and_return_on_first_stage "
        "score_and_return_on_first_stage"
    ),
    "megatron.text_generation.sampling": "modify_logits_for_top_k_filtering modify_logits_for_top_p_filtering sample",
    "megatron.text_generation.tokenization": "detokenize_generations tokenize_prompts",
    "megatron.text_generation_server": "MegatronGenerate MegatronServer",
    "megatron.text_generation_utils": (
        "forward_step generate generate_and_write_samples_unconditional generate_samples_eval "
        "generate_samples_input_from_file generate_samples_interactive generate_samples_unconditional get_batch "
        "get_token_stream pad_batch receive_generate_info sample_sequence_batch send_generate_info switch "
        "synced_generate tokenize_batch top_k_logits"
    ),
    "megatron.timers": "DummyTimer Timer TimerBase",
    "megatron.tokenizer.bert_tokenization": (
        "BasicTokenizer FullTokenizer WordpieceTokenizer convert_by_vocab convert_ids_to_tokens convert_to_unicode "
        "convert_tokens_to_ids load_vocab printable_text validate_case_matches_checkpoint whitespace_tokenize"
    ),
    "megatron.tokenizer.gpt2_tokenization": "GPT2Tokenizer bytes_to_unicode get_pairs",
    "megatron.tokenizer.tokenizer": "AbstractTokenizer",
    "megatron.training": (
        "build_train_valid_test_data_loaders build_train_valid_test_datasets cyclic_iter evaluate evaluate_and_print_results "
        "get_adlr_autoresume get_learning_rate_scheduler get_one_logger get_optimizer_param_scheduler "
        "get_signal_handler get_tensorboard_writer get_train_valid_test_num_samples get_wandb_writer print_datetime "
        "save_checkpoint_and_time train train_step training_log update_train_iters"
    ),
    "megatron.training.argument_utils": (
        "ArgumentGroupFactory TypeInferenceError hybrid_config_from_args inference_cfg_container_from_args "
        "inference_cfg_from_args"
    ),
    "megatron.training.arguments": (
        "add_megatron_arguments la_freq_type load_retro_args load_retro_config moe_freq_type no_rope_freq_type "
        "tuple_type validate_args validate_model_config_args_from_heterogeneous_config"
    ),
    "megatron.training.async_utils": (
        "init_persistent_async_worker is_empty_async_queue maybe_finalize_async_save reset_persistent_async_worker "
        "schedule_async_save"
    ),
    "megatron.training.checkpointing": (
        "CheckpointType check_checkpoint_args checkpoint_exists cleanup_old_non_persistent_checkpoint "
        "ensure_directory_exists find_checkpoint_rank_0 fix_fp8_params_lose_precision_when_loading_dist_ckpt "
        "fix_query_key_value_ordering generate_state_dict get_checkpoint_name get_checkpoint_tracker_filename "
        "get_checkpoint_version get_distributed_optimizer_checkpoint_name get_load_checkpoint_path_by_args "
        "get_loaded_iteration get_rng_state isfile load_args_from_checkpoint load_biencoder_checkpoint "
        "load_checkpoint maybe_save_dataloader_state preprocess_fsdp_dtensor_state_dict read_metadata save_checkpoint "
        "save_grads set_checkpoint_version set_loaded_iteration"
    ),
    "megatron.training.common_config": "ProfilingConfig RNGConfig",
    "megatron.training.datasets.data_samplers": (
        "HybridCPMegatronPretrainingSampler MegatronPretrainingRandomSampler MegatronPretrainingSampler "
        "RandomSeedDataset build_pretraining_data_loader"
    ),
    "megatron.training.datasets.sft_dataset": "MockSFTDataset",
    "megatron.training.dgrad_logging": "DataGradLogger disable_dgrad_logging enable_dgrad_logging save_dgrads",
    "megatron.training.dist_signal_handler": "DistributedSignalHandler all_gather_item get_device get_world_size",
    "megatron.training.distillation": "LossFuncCallable",
    "megatron.training.ft_integration": (
        "get_rank_monitor_client maybe_setup_simulated_fault on_checkpoint_loaded on_checkpointing_end "
        "on_checkpointing_start on_eval_step_end on_eval_step_start on_training_step_end on_training_step_start setup "
        "shutdown"
    ),
    "megatron.training.global_vars": (
        "destroy_global_vars get_adlr_autoresume get_energy_monitor get_one_logger get_signal_handler "
        "get_tensorboard_writer get_wandb_writer rebuild_tokenizer set_args set_global_variables "
        "unset_global_variables"
    ),
    "megatron.training.initialize": "set_jit_fusion_options setup_logging write_args_to_tensorboard",
    "megatron.training.inprocess_restart": "destroy_state inprocess_restart maybe_force_nccl_backend_init",
    "megatron.training.log_handler": "CustomHandler",
    "megatron.training.one_logger_utils": (
        "finish get_timestamp_in_ms on_pretrain_start on_save_checkpoint_end on_save_checkpoint_start "
        "on_save_checkpoint_success on_train_start track_app_tag track_config_flags track_e2e_metrics"
    ),
    "megatron.training.resilience_config": "RerunStateMachineConfig StragglerDetectionConfig",
    "megatron.training.theoretical_memory_usage": (
        "compute_activation_memory compute_activation_memory_without_sp compute_weight_and_optimizer_memory "
        "report_theoretical_memory"
    ),
    "megatron.training.tokenizer.bert_tokenization": (
        "BasicTokenizer FullTokenizer WordpieceTokenizer convert_by_vocab convert_ids_to_tokens convert_to_unicode "
        "convert_tokens_to_ids load_vocab printable_text validate_case_matches_checkpoint whitespace_tokenize"
    ),
    "megatron.training.tokenizer.gpt2_tokenization": (
        "GPT2Tokenizer MERGES_NAME PRETRAINED_VOCAB_POSITIONAL_EMBEDDINGS_SIZE_MAP SPECIAL_TOKENS_NAME VOCAB_NAME "
        "bytes_to_unicode get_pairs"
    ),
    "megatron.training.tokenizer.multimodal_tokenizer": "MultimodalTokenizer PromptConfig",
    "megatron.training.tokenizer.sft_tokenizer": "SFTTokenizer",
    "megatron.training.tokenizer.tokenizer": (
        "CustomTikTokenizer PATTERN_TIKTOKEN PATTERN_TIKTOKEN_V2 create_llama3_tokenizer create_mistral_tokenizer "
        "reload_mergeable_ranks"
    ),
    "megatron.training.training": (
        "MAX_NUM_CHECKPOINTS_MEMORY_REPORTED RL_LOGGABLE_TIMER_NAMES build_train_valid_test_data_loaders "
        "build_train_valid_test_datasets checkpoint_and_decide_exit compute_throughputs_and_append_to_progress_log "
        "consume_seqlen_stats_in_iteration cuda_graph_capture cuda_graph_set_manual_hooks cyclic_iter "
        "destroy_global_state disable_forward_pre_hook dummy_train_step enable_forward_pre_hook evaluate "
        "evaluate_and_print_results force_param_sync get_cuda_graph_input_data get_megatron_ddp_config "
        "get_megatron_optimizer_config get_optimizer_param_scheduler get_start_time_from_progress_log "
        "get_train_valid_test_num_samples has_nvidia_modelopt has_rl_utils num_checkpoints_memory_reported "
        "num_floating_point_operations post_training_step_callbacks preprocess_common_state_dict print_datetime "
        "resolve_ddp_bucket_size save_checkpoint_and_time should_disable_forward_pre_hook stimer train train_step "
        "training_log update_train_iters wrap_model_chunks_with_ddp"
    ),
    "megatron.training.training_config": "CheckpointConfig LoggerConfig SchedulerConfig TrainingConfig ValidationConfig",
    "megatron.training.utils": (
        "ALL_MODULE_WRAPPER_CLASSNAMES append_to_progress_log calc_dtensor_params_l2_norm calc_params_l2_norm "
        "check_adlr_autoresume_termination get_device_arch_version get_nvtx_range "
        "has_nvrx_checkpointing_async_support has_nvrx_installed is_hybrid_model is_rank0 "
        "logical_and_across_model_parallel_group print_params_min_max_norm "
        "reduce_max_stat_across_model_parallel_group report_memory to_empty_if_meta_device update_use_dist_ckpt "
        "warn_rank_0"
    ),
    "megatron.training.wandb_utils": "on_load_checkpoint_success on_save_checkpoint_success",
    "megatron.training.yaml_arguments": (
        "core_config_from_args env_constructor env_pattern load_yaml str_dtype_to_torch validate_yaml"
    ),
}
