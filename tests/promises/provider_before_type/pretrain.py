"""A BERT whose arguments are parsed first, and whose provider stands before the model's type; its data are core's."""

from functools import partial

import torch
from torch.nn import functional

from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import average_losses_across_data_parallel_group

KEYS = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return BertModel(
        config=core_transformer_config_from_args(args) if config is None else config,
        transformer_layer_spec=bert_layer_with_transformer_engine_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        num_tokentypes=2,
        add_binary_head=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def loss_func(loss_mask, sentence_order, output_tensor):
    losses, order_logits = output_tensor
    lm_loss = torch.sum(losses.view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    order_loss = functional.cross_entropy(order_logits.view(-1, 2), sentence_order.view(-1), ignore_index=-1)
    averaged = average_losses_across_data_parallel_group([lm_loss, order_loss])
    return lm_loss + order_loss, {"lm loss": averaged[0], "sop loss": averaged[1]}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    data = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(KEYS, data, torch.int64)
    timers("batch-generator").stop()
    text, types, labels, order, loss_mask, padding_mask = (batch[key] for key in KEYS)
    output = model(text, padding_mask, tokentype_ids=types, lm_labels=labels)
    return output, partial(loss_func, loss_mask.to(torch.float64), order)


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=[get_blend_from_list(args.train_data_path)] * 3,
        split=args.split,
        tokenizer=build_tokenizer(args),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        classification_head=args.bert_binary_head,
        mock=args.mock_data,
    )
    is_built = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, train_val_test_num_samples, is_built, config
    ).build()


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
