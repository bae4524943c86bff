"""Generation with a T5, token by token over the ranks of one replica.

The encoder reads the prompts, the decoder writes.

first step    the encoder reads the prompts and the decoder its first token; each decoder layer caches its keys and
              values of the encoder's output, and those of its own text
each step     one forward of the decoder takes the tokens chosen last; stages send only their hidden states

prompts       a b c d       all begin in column 0; shorter ones are padded on the right, and no token attends to padding
              e f . .
decoder       < k l m       all begin with the same token, so a column's number is its position
              < n o p
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.inference.generate import Stage, cache_problems, generate_tokens, prompt_problems
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.inference.top_k_top_p_sampling import Choose
from megatron.core.ops.attention.kv_cache import CACHES, DecoderCache
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
    cache: str = "contiguous",
) -> Iterator[list[int | None]]:
    """Yield the next id that the decoder writes for each prompt; other arguments as of `generate_batch`.

    model: this rank's stage of a `T5Model`, without sequence parallelism. start_id: the decoder's first token, which is
    not yielded. Raises ValueError before the first step.
    """
    vocab_size = model.vocab_size
    longest = max(map(len, prompts), default=0)
    problems = []
    if max_new_tokens < 1:
        problems.append(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not prompts:
        problems.append("there is no prompt")
    if model.context.rows.global_length(1) > 1:
        problems.append("ranks hold parts of each text; build the model without sequence parallelism")
    for number, ids in enumerate(prompts, 1):
        problems += [f"prompt {number} {problem}" for problem in prompt_problems(ids, vocab_size, longest)]
    problems += [f"the decoder's first token {problem}" for problem in prompt_problems([start_id], vocab_size, 1)]
    problems += cache_problems(cache)
    if problems:
        raise ValueError("; ".join(problems))
    stage = _EncoderDecoderStage(model, mesh or single_rank_mesh(), choose, cache=cache)
    stage.set_prompts(prompts)
    return generate_tokens(
        stage,
        [[start_id]] * len(prompts),
        max_new_tokens=max_new_tokens,
        max_length=1 + max_new_tokens,
        stop_id=stop_id,
        use_cache=use_cache,
    )


class _EncoderDecoderStage(Stage):
    """The stage of a T5: its texts are the decoder's, and the encoder's are the same for all steps."""

    receives_tuple = True

    def set_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Set the encoder's texts, padded on the right."""
        columns = max(map(len, prompts))
        padded = [[*ids, *[0] * (columns - len(ids))] for ids in prompts]
        mask = [[1] * len(ids) + [0] * (columns - len(ids)) for ids in prompts]
        self.encoder_ids = torch.tensor(padded, device=self.device)  # [b, s]
        self.encoder_mask = torch.tensor(mask, device=self.device)  # [b, s]

    def cache(self, starts: Sequence[int], capacity: int) -> DecoderCache:
        assert not any(starts), "the decoder's texts have one length"
        return DecoderCache(len(starts), capacity, self.device, CACHES[self.kind_of_cache])

    @torch.no_grad()
    def logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor | None:
        """Return the logits [b, v] of the decoder's next tokens, as `Stage.logits`. tokens: the decoder's, [b, new]."""
        config = self.model.config
        b, new = tokens.shape
        if cache.length:
            boundary = (TensorSpec((new, b, config.hidden_size), config.residual_dtype),)
        else:
            boundary = self.model.boundary(b, self.encoder_ids.shape[1], new)
        return self.run_stage(boundary, lambda: self.model(self.encoder_ids, tokens, self.encoder_mask, cache=cache))
