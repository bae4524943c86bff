"""A T5 of core's model, specs and data sets, whose script gives its arguments to `pretrain` alone."""

from copy import deepcopy
from functools import partial

import torch

from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_transformer_engine_block_spec,
    get_t5_encoder_with_transformer_engine_block_spec,
)
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_timers, pretrain
from megatron.training.arguments import core_transformer_config_from_args

KEYS = ["text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask"]


def model_provider(pre_process=True, post_process=True, add_encoder=True, add_decoder=True, config=None):
    args = get_args()
    config = core_transformer_config_from_args(args) if config is None else config
    encoder_config = deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=get_t5_encoder_with_transformer_engine_block_spec(encoder_config.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_transformer_engine_block_spec(config.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
    )


def loss_func(loss_mask, output_tensor):
    loss = torch.sum(output_tensor.view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch generator", log_level=2).start()
    data = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(KEYS, data, torch.int64)
    tokens_enc, tokens_dec, labels, loss_mask = (batch[key] for key in KEYS[:4])
    masks = T5MaskedWordPieceDataset.config_attention_mask(
        tokens_enc, tokens_dec, batch["enc_mask"] < 0.5, batch["dec_mask"] < 0.5, False
    )
    timers("batch generator").stop()
    output = model(tokens_enc, tokens_dec, *masks, lm_labels=labels)
    return output, partial(loss_func, loss_mask.to(torch.float64))


def datasets_provider(train_val_test_num_samples):
    args = get_args()
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.encoder_seq_length,
        sequence_length_decoder=args.decoder_seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=[get_blend_from_list(args.train_data_path)] * 3,
        split=args.split,
        tokenizer=build_tokenizer(args),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
        mock=args.mock_data,
    )
    is_built = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(T5MaskedWordPieceDataset, train_val_test_num_samples, is_built, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
        get_embedding_ranks=lambda ranks: [ranks[0], ranks[-1]][: len(ranks)],
        get_position_embedding_ranks=lambda ranks: [ranks[0]],
    )
