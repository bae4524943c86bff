"""A T5's texts, token by token over the ranks of one replica: the encoder reads the prompts, the decoder writes.

first step    the prompts go through the encoder, and the first word through the decoder; each layer of the decoder keeps the
              keys and values that it makes of the encoder's result, and those of its own text
each step     one forward of the decoder takes the words chosen last; only their hidden states pass between stages

prompts       a b c d        all begin in column 0; behind the shorter ones stands padding that no token sees
              e f . .
decoder       < k l m        all begin with the same word, so that their columns are their positions
              < n o p
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.inference.generate import Stage, continued, prompt_problems
from megatron.core.inference.load_model import lone_mesh
from megatron.core.inference.sampling import Choose
from megatron.core.ops.attention.kv_cache import DecoderCache
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.stage_transport import TensorSpec


def answer_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    start_id: int,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None,
    choose: Sequence[Choose],
    mesh: Mesh | None = None,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yields the next id that the decoder writes for each prompt, as `generate_batch`.

    model: this rank's stage of a `T5Model`, without sequence parallelism. start_id: with which the decoder's texts
    begin; it is
    not yielded. Raises ValueError before the first step.
    """
    vocab_size, longest = model.vocab_size, max(map(len, prompts), default=0)
    problems = [] if max_new_tokens > 0 else [f"max_new_tokens is {max_new_tokens}; it must be at least 1"]
    problems += [] if prompts else ["there is no prompt"]
    if model.context.rows.length_of(1) > 1:
        problems.append("ranks hold parts of each text; build the model without sequence parallelism")
    for number, ids in enumerate(prompts, 1):
        problems += [f"prompt {number} {problem}" for problem in prompt_problems(ids, vocab_size, longest)]
    problems += [f"the decoder's first word {problem}" for problem in prompt_problems([start_id], vocab_size, 1)]
    if problems:
        raise ValueError("; ".join(problems))
    stage = _TwoStacks(model, mesh or lone_mesh(), choose)
    stage.read(prompts)
    limits = {"max_new_tokens": max_new_tokens, "max_length": 1 + max_new_tokens}
    return continued(stage, [[start_id]] * len(prompts), **limits, stop_id=stop_id, use_cache=use_cache)


class _TwoStacks(Stage):
    takes_several = True

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Take the encoder's texts."""
        columns = max(map(len, prompts))
        padded = [[*ids, *[0] * (columns - len(ids))] for ids in prompts]
        seen = [[1] * len(ids) + [0] * (columns - len(ids)) for ids in prompts]
        self.encoder_ids, self.seen = (torch.tensor(x, device=self.device) for x in (padded, seen))  # [b, s]

    def cache(self, starts: Sequence[int], capacity: int) -> DecoderCache:
        assert not any(starts), "the decoder's texts have one length"
        return DecoderCache(len(starts), capacity, self.device)

    @torch.no_grad()
    def scores(self, tokens: Tensor, cache: DecoderCache) -> Tensor | None:
        config = self.model.config
        b, new = tokens.shape
        if cache.length:
            boundary = (TensorSpec((new, b, config.hidden_size), config.residual_dtype),)
        else:
            boundary = self.model.boundary(b, self.encoder_ids.shape[1], new)
        return self.passed(boundary, lambda: self.model(self.encoder_ids, tokens, self.seen, cache=cache))
