"""Text continued one token at a time, in one process.

There is no cache yet: each token costs a forward over the whole text so far. A text that has grown past `max_length` is
seen through a window of its last `max_length` tokens, numbered from position 0 again, so that what lies further
back is forgotten at once rather than slowly:

    max_length 4    a b c d | e           the scores of e from a b c d at positions 0 1 2 3
                      b c d e | f         the scores of f from b c d e at positions 0 1 2 3
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.inference.sampling import Choose


def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    max_length: int,
    stop_id: int | None,
    choose: Choose,
) -> Iterator[int]:
    """The ids that follow `prompt_ids`, each as soon as it is known: `max_new_tokens`, or fewer if `stop_id` comes.

    `stop_id` itself is not given; None never stops. model: a whole `GPTModel`, in any mode, which is kept. max_length:
    at most the model's number of positions; with rotary ones the length that it was trained with. Raises ValueError at
    once, before the first id is asked for.
    """
    problems = [
        f"{name} is {value}; it must be at least 1"
        for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length))
        if value < 1
    ]
    if not prompt_ids:
        problems.append("the prompt has no token; begin with the one that ends documents")
    elif not 0 <= min(prompt_ids) <= max(prompt_ids) < model.vocab_size:
        problems.append(
            f"the prompt has ids from {min(prompt_ids)} to {max(prompt_ids)}, "
            f"the model those from 0 to {model.vocab_size - 1}"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return _continue(model, list(prompt_ids), max_new_tokens, max_length, stop_id, choose)


def _continue(
    model: nn.Module, ids: list[int], max_new_tokens: int, max_length: int, stop_id: int | None, choose: Choose
) -> Iterator[int]:
    for _ in range(max_new_tokens):
        new = choose(next_scores(model, ids[-max_length:]))
        if new == stop_id:
            return
        ids.append(new)
        yield new


@torch.no_grad()
def next_scores(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The scores of the token after `ids`, by a forward over all of them, without dropout. -> [v], without padding"""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)  # [1, s]
    with _evaluating(model):
        scores = model(tokens, torch.arange(len(ids), device=device)[None])  # [1, s, padded v]
    return scores[0, -1, : model.vocab_size]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then every module's own again. Around each forward: a caller may leave between two ids."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
