"""List every key of ds_config: what works, what has no effect, and what is refused.

`docs/deepspeed.md` has the same tables.

WORKS: key -> the kind of its value, what it does, and the lowest and highest value or the texts that it may be.
NO_EFFECT, REFUSED: a reason, or what to do instead -> keys, with their sections before them.
"""

from megatron.deepspeed.refuse_unsupported_config_keys import WorkingKey

WORKS = {
    "train_batch_size": WorkingKey(
        int, "samples of a step, over all ranks: micro batch x accumulation x ranks", lowest=1
    ),
    "train_micro_batch_size_per_gpu": WorkingKey(int, "samples of one forward on one rank", lowest=1),
    "gradient_accumulation_steps": WorkingKey(int, "micro batches of a step, on one rank", lowest=1),
    "gradient_clipping": WorkingKey(
        float, "the largest global norm of the gradient; default 0, and infinity: no clipping", may_be_infinite=True
    ),
    "gradient_allreduce_op": WorkingKey(
        str, "mean (default) or sum of the ranks' gradients, in every stage", texts=("mean", "sum")
    ),
    "dataloader_drop_last": WorkingKey(bool, "the loader drops a last batch that is not full; default false"),
    "steps_per_print": WorkingKey(
        int,
        "the first rank prints step, rate, norm and mean loss this often; default, and infinity: never",
        lowest=1,
        may_be_infinite=True,
    ),
    "optimizer.type": WorkingKey(str, "Adam, AdamW or SGD, in any case of letters"),
    "optimizer.params": WorkingKey(dict, "lr, weight_decay; betas, eps, adam_w_mode, torch_adam; momentum"),
    "scheduler.type": WorkingKey(str, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
    "scheduler.params": WorkingKey(dict, "the arguments of the schedule"),
    "fp16.enabled": WorkingKey(bool, "switches the section on; default false"),
    "fp16.auto_cast": WorkingKey(bool, "casts the inputs of a forward to float16; default false"),
    "fp16.loss_scale": WorkingKey(float, "a fixed loss scale; default 0: dynamic"),
    "fp16.initial_scale_power": WorkingKey(int, "the dynamic scale begins at 2 to this power; default 16", highest=127),
    "fp16.loss_scale_window": WorkingKey(
        int, "steps without overflow before the scale doubles; default 1000", lowest=1
    ),
    "fp16.hysteresis": WorkingKey(int, "overflows after which the scale is halved; default 2", lowest=1),
    "fp16.consecutive_hysteresis": WorkingKey(bool, "a step without overflow restores the hysteresis; default false"),
    "fp16.min_loss_scale": WorkingKey(
        float, "the smallest scale, where an overflow is an error; default 1; rounded up to a power of two"
    ),
    "bf16.enabled": WorkingKey(bool, "switches the section on; default false"),
    "zero_optimization.stage": WorkingKey(
        int,
        "shards nothing (0), optimizer state (1), gradients (2), parameters (3); `zero_optimization: true` is stage 1",
        lowest=0,
        highest=3,
    ),
    "zero_optimization.overlap_comm": WorkingKey(bool, "communicates while it computes; default false in every stage"),
    "zero_optimization.reduce_bucket_size": WorkingKey(
        int, "elements per bucket, where buckets are cut by size", lowest=1
    ),
    "zero_optimization.offload_optimizer.device": WorkingKey(
        str, "the device that keeps optimizer state; default none: no offload", texts=("cpu", "nvme", "none")
    ),
    "zero_optimization.offload_optimizer.nvme_path": WorkingKey(
        str, "folder for the files of device nvme, on a fast local disk"
    ),
    "zero_optimization.offload_optimizer.ratio": WorkingKey(
        float, "share of the state that is offloaded; default 1", lowest=0, highest=1
    ),
    "zero_optimization.offload_param.device": WorkingKey(
        str,
        "the device that keeps the parameter shards of stage 3; default none: no offload",
        texts=("cpu", "nvme", "none"),
    ),
    "zero_optimization.offload_param.nvme_path": WorkingKey(
        str, "folder for the files of device nvme, on a fast local disk"
    ),
}

NO_EFFECT = {
    "gradients are divided by the number of ranks once, after the reduction, in its precision": (
        "prescale_gradients",
        "gradient_predivide_factor",
        "communication_data_type",
        "seq_parallel_communication_data_type",
    ),
    "gradients are in contiguous buffers, and are reduced to the ranks that own their shards": (
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.legacy_stage1",
        "zero_optimization.ignore_unused_parameters",
    ),
    "stage 3 has the full parameters of one layer in memory, of two with overlap_comm, and of no other": (
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.max_live_parameters",
        "zero_optimization.max_reuse_distance",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.param_persistence_threshold",
        "zero_optimization.model_persistence_threshold",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.override_module_apply",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.leaf_module",
        "zero_optimization.module_granularity_threshold",
    ),
    "the optimizer updates slice by slice and prefetches the next slice; memory that an accelerator reads is pinned": (
        "zero_optimization.sub_group_size",
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.pipeline",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
        "aio",
    ),
    "a checkpoint holds float32 masters, can be loaded in any layout, and is verified": (
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.pipeline_loading_checkpoint",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "checkpoint.tag_validation",
        "checkpoint.load_universal",
        "checkpoint.use_node_local_storage",
        "checkpoint.parallel_write",
        "checkpoint.writer",
        "checkpoint.checkpoint_serialization",
    ),
    "optimizers are those of this project": (
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer.legacy_fusion",
    ),
    "nothing in the file is printed but what steps_per_print says": (
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "log_level",
    ),
    "only deepspeed.checkpointing reads it, which is not here; torch.utils.checkpoint works": (
        "activation_checkpointing",
    ),
    "a norm that is not finite is an error, or under a loss scale an overflow, in every precision": (
        "bf16.check_overflow",
    ),
    "each backward accumulates its gradients at once": ("bf16.immediate_grad_update",),
}

REFUSED = {
    "this keeps masters in half precision; leave it out: masters, sums and moments are float32": (
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ),
    'gradients are summed in float32; leave it out, or give "fp32"': ("data_types.grad_accum_dtype",),
    "use fp16 or bf16, or torch.autocast in the script": ("amp", "torch_autocast"),
    "bfloat16 has no such form here; use bf16": ("ddp_bf16", "bfloat16"),
    "step() must be called after every backward; leave it out": ("managed_gradient_accumulation",),
    "use offload_optimizer or offload_param with a device": (
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
    ),
    "gradients are dense; leave it out": ("sparse_gradients", "disable_allgather"),
    "communication is not quantized, nor in two levels; leave it out": (
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zeropp_loco_param",
        "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.zenflow",
    ),
    "the only optimizers are Adam, AdamW and SGD; leave it out": (
        "zero_optimization.save_muon_momentum_buffer_in_memory",
    ),
    "use pretrain_gpt.py, whose flags divide models over ranks": (
        "tensor_parallel",
        "expert_parallel",
        "pipeline",
        "sequence_parallel_size",
        "data_parallel_size",
        "hybrid_engine",
        "use_data_before_expert_parallelism",
        "compile",
    ),
    "attention is the model's own; leave it out": ("sparse_attention",),
    "no monitor is built into the engine; log engine.get_global_grad_norm() and engine.get_lr() in the script": (
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "monitor_config",
    ),
    "use torch.profiler in the script, or tools/estimate_memory.py": ("flops_profiler", "comms_logger"),
    "nothing searches for settings; give them": ("autotuning",),
    "a job has one size; restart from a checkpoint, which any number of ranks loads": ("elasticity",),
    "the order of the data is the script's; leave it out": ("data_efficiency", "curriculum_learning"),
    "models are trained as they are; leave it out": (
        "compression_training",
        "progressive_layer_drop",
        "eigenvalue",
        "quantize_training",
        "weight_quantization",
    ),
    "checkpoints are written by save_checkpoint alone; leave it out": ("nebula", "datastates_ckpt"),
}

# Refused keys with one of these values are accepted, since it asks for what happens anyway.
HARMLESS = {
    "data_types.grad_accum_dtype": "fp32",
    "managed_gradient_accumulation": True,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "sequence_parallel_size": 1,
}
