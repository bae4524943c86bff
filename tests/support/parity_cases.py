"""Cases of the layout space, run with ranks as threads and compared with one process: what test_parity and the sweep share."""

import math
from dataclasses import replace
from functools import lru_cache

from layout_space import Case
from tiny_run import SEQ, TINY_GPT2, TINY_LLAMA, Layout, Outcome, Texts, assert_equal, differences, run
from traffic import Setting, calls_of_step

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.transformer.model_config import ModelConfig

TOLERANCE = 1e-10
BUCKET = 1500  # elements: several buckets on every rank, with layers of 1000 to 3000

_STYLES = {"gpt2": TINY_GPT2, "llama": replace(TINY_LLAMA, num_query_groups=4)}
_CORNERS: dict[str, dict] = {
    "plain": {},
    "5 words": {},
    "two groups": {"group_query_attention": True, "num_query_groups": 2},
    "one group": {"group_query_attention": True, "num_query_groups": 1},
    "smoothing": {"label_smoothing": 0.1, "z_loss_coeff": 0.01},
    # With rotary positions: without them the gradient of a key's bias is zero but for rounding, and nothing to compare.
    "head norms": {"qk_layernorm": True, "position_embedding_type": "rope"},
    "masks": {},
    # Every third layer of the whole model without a window: a stage that counted its own layers would leave out others.
    "windows": {"window_size": "2,0", "window_attn_skip_freq": "3"},
}


def model_of(case: Case) -> ModelConfig:
    return replace(
        _STYLES[case.style],
        num_layers=case.layers,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        untie_embeddings_and_output_weights=not case.tied,
        **_CORNERS[case.corner],
    )


def texts_of(case: Case) -> Texts:
    return Texts(vocab=5 if case.corner == "5 words" else Texts().vocab, documents=case.corner == "masks")


def layout_of(case: Case) -> Layout:
    overlap = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=BUCKET)
    return Layout(
        tp=case.tp,
        sp=case.sp,
        pp=case.pp,
        dp=case.dp,
        m=case.m,
        v=case.v,
        schedule=case.schedule,
        recompute=case.recompute,
        scatter=case.scatter,
        delayed=case.delayed,
        data_parallel=overlap if case.overlap else DataParallelConfig(),
    )


@lru_cache(maxsize=64)
def one_process(config: ModelConfig, texts: Texts, global_batch: int, steps: int) -> Outcome:
    return run(config, Layout(), global_batch=global_batch, texts=texts, steps=steps)


def outcomes(case: Case, compile: str = "off", steps: int = 3) -> tuple[Outcome, Outcome]:
    """What the case computes, and what one process does, eagerly."""
    config, texts = model_of(case), texts_of(case)
    shared = {"global_batch": case.global_batch, "texts": texts, "steps": steps}
    return run(replace(config, compile=compile), layout_of(case), **shared), one_process(config, **shared)


def assert_as_one_process(case: Case, compile: str = "off") -> None:
    """The numbers of one process, for the calls worked out by hand: every call of every rank, and nothing else."""
    # After two steps moments and weights are a run's; the sweep takes a third.
    got, expected = outcomes(case, compile, steps=2)
    assert_equal(got, expected, TOLERANCE)
    setting = Setting(model_of(case), layout_of(case), SEQ, texts_of(case).vocab, case.global_batch)
    for pp_rank, calls in got.calls:
        assert calls == calls_of_step(setting, pp_rank)


def worst_difference(case: Case, compile: str = "off") -> tuple[float, str]:
    """The largest difference from one process, and where it is."""
    return worst_of(*outcomes(case, compile))


def worst_of(got: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest difference relative to the largest value of its tensor, and where it is."""
    found = [
        (math.inf if not math.isfinite(worst) else worst / scale if scale else math.inf * (worst > 0), what)
        for what, worst, scale in differences(got, expected)
        if worst or not math.isfinite(worst)
    ]
    return max(found, default=(0.0, ""))
