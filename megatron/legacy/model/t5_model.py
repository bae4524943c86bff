"""Provide `T5Model` of the releases before core's."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.models.T5 import t5_stage
from megatron.legacy.model.language_model import check_token_types, parts_of_stage, settings_of
from megatron.training.global_vars import get_runtime


class T5Model(t5_stage.T5Model):
    """One pipeline stage of a T5. config: as for GPTModel.

    forward(encoder_input_ids [b, s], decoder_input_ids [b, t], encoder_attn_mask, decoder_attn_mask,
    encoder_decoder_attn_mask, lm_labels [b, t]) -> the loss of each token [b, t], or without labels the logits; before
    the last stage the tensors of `boundary`. The first mask, [b, s], [b, s, s] or [b, 1, s, s], is True where attention
    is forbidden and says which of the encoder's tokens are padding; the others are not read, as the decoder is causal.
    Where the constructor is given no pre_process, as in the releases without pipelining, the result is a pair: the
    losses or logits, and None.

    add_encoder, add_decoder: of the stage, which follows from the run.
    """

    def __init__(
        self,
        config: Any = None,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        pre_process: bool | None = None,
        post_process: bool = True,
        add_encoder: bool = True,
        add_decoder: bool = True,
    ):
        del add_encoder, add_decoder
        check_token_types("T5Model", num_tokentypes, 0)
        settings = settings_of(config)
        super().__init__(
            # with tied weights the logits have a bias and the hidden states are not scaled
            replace(
                settings, scale_decoder_outputs=False, add_output_bias=not settings.untie_embeddings_and_output_weights
            ),
            decoder_seq_length=get_runtime().config.data.decoder_seq_length,
            **parts_of_stage(pre_process is not False, post_process),
        )
        self.config = config or self.settings
        self.parallel_output = parallel_output
        self.returns_contiguous = True
        self.returns_pair = pre_process is None

    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        encoder_attn_mask: Tensor,
        decoder_attn_mask: Tensor | None,
        encoder_decoder_attn_mask: Tensor | None,
        tokentype_ids: None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        """See the class for shapes. Every tensor-parallel rank must call."""
        del decoder_attn_mask, encoder_decoder_attn_mask, tokentype_ids
        is_padding = encoder_attn_mask
        if is_padding.dim() > 2:
            is_padding = is_padding.flatten(1, -2).all(dim=1)  # [b, s]: keys that no query attends to
        output = super().forward(encoder_input_ids, decoder_input_ids, (~is_padding).to(torch.int64), lm_labels)
        return (output, None) if self.returns_pair else output


__getattr__ = names_of_megatron(__name__)
