"""A small BERT trained inside `run_ranks`, as tests/support/tiny_run.py trains a GPT."""

from dataclasses import replace
from functools import partial

import torch
from tiny_run import SEQ, TINY_GPT2, TINY_LLAMA, Subject, Texts
from torch import Tensor
from torch.nn import functional

from megatron.core.models.bert.bert_stage import BertModel

CONFIGS = {
    "bert": TINY_GPT2,
    "bert-untied": replace(
        TINY_GPT2, untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "swiglu-rope": TINY_LLAMA,
}


def sample(number: int, texts: Texts) -> dict[str, Tensor]:
    """Two sentences, some padding, some words to restore, and whether the sentences were swapped."""
    generator = torch.Generator().manual_seed(2000 + number)
    length = int(torch.randint(SEQ // 2, SEQ + 1, (), generator=generator))
    labels = torch.randint(0, texts.vocab, (SEQ,), generator=generator)
    masked = torch.rand(SEQ, generator=generator) < 0.4
    masked[0] = True
    masked[length:] = False
    return {
        "text": torch.randint(0, texts.vocab, (SEQ,), generator=generator),
        "types": (torch.arange(SEQ) > length // 2).long(),
        "padding_mask": (torch.arange(SEQ) < length).long(),
        "labels": torch.where(masked, labels, -1),
        "loss_mask": masked.double(),
        "is_random": torch.tensor(number % 2),
    }


def loss_func(batch: dict[str, Tensor], output: tuple[Tensor, Tensor | None]):
    """The mean over masked words plus the mean over pairs, as Megatron's pretrain_bert has it."""
    losses, order = output
    restored = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    told = 0.0 if order is None else functional.cross_entropy(order, batch["is_random"])
    return restored + told, {"lm loss": (restored + told).detach()}


def sum_loss_func(batch: dict[str, Tensor], output: tuple[Tensor, Tensor | None]):
    """Sums over words, which ranks that share samples can add up, and a share of the pairs' for each of these ranks."""
    losses, order = output
    told = functional.cross_entropy(order, batch["is_random"], reduction="sum") * losses.shape[1] / SEQ
    total, count = (losses * batch["loss_mask"]).sum() + told, batch["loss_mask"].sum()
    return total, count, {"lm loss": torch.stack((total.detach(), count))}


def forward_step(data, model, loss=loss_func):
    batch = next(data)
    output = model(batch["text"], batch["padding_mask"], batch["types"], batch["labels"])
    return output, partial(loss, batch)


def make(config, **parts) -> BertModel:
    return BertModel(config, positions=SEQ, **parts)


UNCUT = "padding_mask", "is_random"
BERT = Subject(make, forward_step, sample)
SHARED_BERT = Subject(make, partial(forward_step, loss=sum_loss_func), sample, UNCUT)
