"""Generation with forced tokens: the scores from which each token would have been drawn."""

from dataclasses import replace
from functools import partial

import torch
from option_cases import BUNDLES
from tiny_run import GPT, GPT2, LLAMA, Layout, Subject, build_chunks

from megatron.core.inference.generate import generate_batch
from megatron.core.parallel.mesh import Mesh

MODELS = {
    "gpt2": replace(GPT2, init_method_std=0.3),  # large weights: what attention sees matters
    "llama": replace(LLAMA, init_method_std=0.3),
    "two groups": replace(LLAMA, num_query_groups=2, init_method_std=0.3, qk_layernorm=True),
    "half rotary": replace(LLAMA, num_query_groups=1, init_method_std=0.3, rotary_percent=0.5),
    "windows": replace(LLAMA, init_method_std=0.3, window_size="2,0", window_attn_skip_freq="2"),
    "plain kernel": replace(GPT2, init_method_std=0.3, attention_backend="unfused"),
    **{name: replace(LLAMA, init_method_std=0.3, **BUNDLES[name]) for name in ("gemma3", "oss", "cohere2")},
}
PROMPTS = [[3], [7, 1, 4], [60, 2, 9, 9, 5]]
AFTER = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]  # what is "drawn", whatever the scores


def forced(
    mesh: Mesh,
    config,
    *,
    length: int,
    use_cache: bool = True,
    kind: str = "p2p",
    cache: str = "contiguous",
    subject: Subject = GPT,
) -> list[list[torch.Tensor]]:
    """The scores that this rank was asked to draw from, by text and step."""
    seen: list[list[torch.Tensor]] = [[] for _ in PROMPTS]

    def draw(scores: torch.Tensor, text: int) -> int:
        seen[text].append(scores)
        return AFTER[text][len(seen[text]) - 1]

    stages, _, _ = build_chunks(mesh, config, Layout(pp=mesh["pp"].size, cp_types=(kind,)), subject=subject)
    steps = generate_batch(
        stages[mesh["pp"].rank].module,
        PROMPTS,
        max_new_tokens=3,
        max_length=length,
        stop_id=None,
        mesh=mesh,
        use_cache=use_cache,
        cache=cache,
        choose=[partial(draw, text=text) for text in range(len(PROMPTS))],
    )
    assert [list(step) for step in zip(*steps)] == AFTER, "every rank learns every id"
    return seen
