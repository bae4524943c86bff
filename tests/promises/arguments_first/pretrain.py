"""A GPT as Megatron's latest script has it: the arguments are parsed first, the model is a config, and core cuts the batches."""

import time
from functools import partial

import torch

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

NOT_USED_HERE = (
    GPTFIMDataset,
    GPTFIMDatasetConfig,
    SFTDataset,
    get_gpt_heterogeneous_layer_spec,
    get_transformer_block_with_experimental_attention_variant_spec,
)
NAMES = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")
stimer = StragglerDetector()


def get_batch(data_iterator, vp_stage):
    args = get_args()
    config = core_transformer_config_from_args(args)
    predicts_more = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts_more:
        return [None] * len(NAMES)
    batch = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else {}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_more,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[name] for name in NAMES]


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.view(-1)
    loss_mask = loss_mask.view(-1).to(losses.dtype)
    loss = torch.sum(losses * loss_mask)
    machine = get_rerun_state_machine()
    machine.validate_result(result=loss, rejection_func=torch.isnan, message="NaN in the loss", tolerance=0.0)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        attention_mask, labels, loss_mask, position_ids, tokens = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    with stimer:
        output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=None)
    return output, partial(loss_func, loss_mask)


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    is_built = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(MockGPTDataset, train_val_test_num_samples, is_built, config).build()


def get_embedding_ranks(pp_ranks):
    ranks = [pp_ranks[0]]
    if len(pp_ranks) > 1:
        if not get_args().untie_embeddings_and_output_weights:
            ranks.append(pp_ranks[-1])
        ranks.extend(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(get_args())))
    return sorted(set(ranks))


if __name__ == "__main__":
    set_startup_timestamps(program_start=time.time(), main_entry=time.time())
    datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        container,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
