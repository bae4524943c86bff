"""An attention kernel of one's own under GPT: each token sees itself and the two before it."""

import torch
from torch import Tensor

from megatron.core.enums import ModelType
from megatron.core.ops.attention.document_and_window_masks import Mask
from megatron.core.ops.attention.kernels import KERNELS, AttentionCase, Kernel
from megatron.core.ops.layout_invariant_dropout import AttentionDropout
from megatron.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider

WINDOW = 3


def window_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """One einsum for each distance, so that no s x s scores are held. q, k, v: [b, n, s, d]"""
    length = q.shape[2]
    shifted = [torch.nn.functional.pad(x, (0, 0, WINDOW - 1, 0)) for x in (k, v)]
    keys, values = (torch.stack([x[:, :, i : i + length] for i in range(WINDOW)], dim=3) for x in shifted)
    scores = torch.einsum("bnsd,bnswd->bnsw", q, keys) / q.shape[-1] ** 0.5
    position, place = torch.arange(length)[:, None], torch.arange(WINDOW)
    probabilities = scores.masked_fill(position + place < WINDOW - 1, float("-inf")).softmax(dim=-1)
    return torch.einsum("bnsw,bnswd->bnsd", probabilities, values)


def refuses(case: AttentionCase) -> str | None:
    if case.mask is not None or case.q.shape != case.k.shape:
        return "is for causal training with as many key/value heads as query heads"
    return "has no dropout" if case.dropout else None


KERNELS["window"] = Kernel(window_attention, refuses)

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
