"""Published formulas for memory, and how far a prediction is from those whose conditions it meets. Pure.

parameters     arXiv:2104.04473, equation 2
state          bytes a parameter of ZeRO (arXiv:1910.02054, section 5.4) in our precisions, which for stage 1 are the table of
               Megatron-LM's distributed optimizer
activations    bytes a layer, arXiv:2205.05198, table 2
"""

from dataclasses import dataclass

from megatron.training.memory.estimate import RankMemory
from megatron.training.memory.parameters import held_count, layer_parameters, parameter_count
from megatron.training.memory.sizes import LayerSizes, RunSizes
from megatron.training.memory.steps import layer_segments

AGREES = 0.01


@dataclass(frozen=True)
class Anchor:
    """A published figure beside ours."""

    what: str
    published: float
    ours: float

    @property
    def difference(self) -> float:
        """Of ours, as a share of what is published."""
        return self.ours / self.published - 1

    def __str__(self) -> str:
        return f"{self.what} ({self.difference:+.2%})"


def zero_bytes_per_parameter(stage: int, ranks: int, *, param: float = 2, grad: float = 2, rest: float = 12) -> float:
    """What a rank keeps of each parameter. rest: masters and moments, 12 for Adam beside half-precision parameters.

    7.5 billion parameters on 64 ranks, stages 0 to 3: 120, 31.4, 16.6 and 1.9 GB (the paper's figure 1).
    """
    return sum(
        size / (ranks if stage >= divided_from else 1) for size, divided_from in ((rest, 1), (grad, 2), (param, 3))
    )


def gpt_parameters(layers: int, h: int, words: int, positions: int) -> float:
    """12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h): GPT-2 without the final norm."""
    return 12 * layers * h * h * (1 + 13 / (12 * h) + (words + positions) / (12 * layers * h))


def layer_activations(sizes: LayerSizes) -> float:
    """Bytes of a layer of GPT-2 in half precision, without what core attention keeps of its scores."""
    sbh, t = sizes.s * sizes.b * sizes.h, sizes.t
    if sizes.recompute in ("uniform", "block"):
        return 2 * sbh / (t if sizes.sequence_parallel or sizes.saves_parts else 1)
    return sbh * (34 / t if sizes.sequence_parallel else 10 + 24 / t)


def anchors_of(run: RunSizes, ranks: list[RankMemory]) -> list[Anchor]:
    """Those whose conditions the run meets."""
    return [*_parameters(run), *_state(run, ranks), *_activations(run)]


def _parameters(run: RunSizes) -> list[Anchor]:
    sizes = run.layer.undivided
    if sizes.is_bert or not (_is_gpt2(sizes) and sizes.tied and sizes.positions):
        return []
    published = gpt_parameters(sum(map(len, run.layers)), sizes.h, sizes.words, sizes.positions)
    return [Anchor("arXiv:2104.04473 eq. 2, parameters", published, parameter_count(run))]


def _state(run: RunSizes, ranks: list[RankMemory]) -> list[Anchor]:
    sizes, shards = run.layer, run.shards
    if (
        run.fixed_order
        or run.moments != 2
        or run.divides_outer
        or run.splits_masters
        or sizes.main_grad_bytes != sizes.grad_bytes
    ):
        return []
    rest = sizes.grad_bytes * (run.moments + sizes.is_half)
    each = zero_bytes_per_parameter(run.zero_stage, shards, param=sizes.param_bytes, grad=sizes.grad_bytes, rest=rest)
    ours = sum(rank.state for rank in ranks)
    what = f"arXiv:1910.02054 stage {run.zero_stage}, {each:.4g} bytes a parameter of state"
    return [Anchor(what, each * held_count(run), ours)]


def _activations(run: RunSizes) -> list[Anchor]:
    sizes = run.layer
    half = sizes.param_bytes == sizes.residual_bytes == 2
    if not (_is_gpt2(sizes) and half and sizes.hidden_dropout):
        return []
    if not sizes.fused_attention and sizes.recompute is None:
        return []  # the plain kernel keeps more of the scores than Megatron's did: docs/memory.md
    if sizes.recomputes("mlp") or sizes.recomputes("layernorm"):
        return []
    kept = sum(segment.keeps for segment in layer_segments(sizes))
    if sizes.recompute in ("uniform", "block"):
        kept = sizes.stream * sizes.residual_bytes // (sizes.t if sizes.saves_parts else 1)
    return [Anchor("arXiv:2205.05198 table 2, activations of a layer", layer_activations(sizes), kept)]


def _is_gpt2(sizes: LayerSizes) -> bool:
    """The layer that the papers count."""
    whole = sizes.heads * sizes.d * sizes.t == sizes.h and sizes.heads == sizes.kv_heads
    plain = not (sizes.gated or sizes.rms or sizes.qk_norm or sizes.rotary_width)
    return (
        whole
        and plain
        and sizes.linear_bias
        and sizes.f * sizes.t == 4 * sizes.h
        and len(layer_parameters(sizes)) == 12
    )


def sentence(anchors: list[Anchor]) -> list[str]:
    """What agrees, and what does not."""
    agrees = [anchor for anchor in anchors if abs(anchor.difference) <= AGREES]
    differs = [anchor for anchor in anchors if abs(anchor.difference) > AGREES]
    lines = [f"agrees with {'; '.join(map(str, agrees))}"] if agrees else []
    lines += [f"differs from {'; '.join(map(str, differs))}"] if differs else []
    return lines or ["no published formula is about such a model"]
