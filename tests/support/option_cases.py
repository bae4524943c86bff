"""Models with the options of published families, in the layouts of the layout space: what test_option_parity and the sweep share.

A bundle has options that meet in one family, so that pairs of options meet too; the families' numbers are another test's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from layout_space import DIMENSIONS, Case, covering_cases
from parity_cases import layout_of, model_of, one_process, texts_of, worst_of
from tiny_run import TINY_LLAMA, Layout, run

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.transformer.model_config import ModelConfig

_ROPE = {"position_embedding_type": "rope"}
_WINDOWS = {"window_size": "2,0", "window_attn_skip_freq": "3"}
_GEMMA = {
    "swiglu": False,
    "gated": True,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "norm_placement": "sandwich",
}
_YARN = '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 5, "beta_fast": 3, "beta_slow": 0.4}'
_LONG = (
    '{"rope_type": "longrope", "factor": 8, "original_max_position_embeddings": 5, "short_factor": [1, 1.1], '
    '"long_factor": [1.5, 2]}'
)
_DYNAMIC = '{"rope_type": "dynamic", "factor": 3, "original_max_position_embeddings": 5}'
BUNDLES: dict[str, dict] = {
    "neox": {**_ROPE, "rotary_percent": 0.5, "norm_placement": "parallel", "swiglu": False, "activation": "gelu"},
    "phi": {
        **(_ROPE | {"rotary_percent": 0.5, "norm_placement": "parallel-one-norm"}),
        **{"normalization": "LayerNorm", "add_bias_linear": True, "add_output_bias": True, "qk_layernorm": True},
    },
    "gemma2": {
        **(_ROPE | _GEMMA | _WINDOWS),
        **{
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 1.5,
            "embedding_multiplier": 4.0,
            "softmax_scale": 0.4,
        },
    },
    "gemma3": {
        **(_ROPE | _GEMMA | _WINDOWS),
        **{"qk_layernorm": True, "rotary_base_of_windows": 50.0, "rotary_seq_len_interpolation_factor": 8.0},
    },
    "olmo3": {
        **(_ROPE | _WINDOWS | {"norm_placement": "branch", "normalization": "RMSNorm"}),
        **{"qk_layernorm": True, "qk_norm_over": "width", "rope_scaling": _YARN, "rotary_base_of_windows": 10000.0},
    },
    "cohere2": {
        **(
            _ROPE | _WINDOWS | {"norm_placement": "parallel-one-norm", "normalization": "LayerNorm", "norm_bias": False}
        ),
        **{"rotary_interleaved": True, "no_rope_freq": "3", "logit_multiplier": 0.25},
        **{"qk_layernorm": True, "qk_norm_over": "each-head"},
    },
    "granite": {
        **(_ROPE | {"rope_scaling": _DYNAMIC}),
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logit_multiplier": 0.125, "softmax_scale": 0.3},
    },
    "oss": {
        **(_ROPE | _WINDOWS | {"softmax_type": "learnable", "rope_scaling": _YARN, "add_qkv_bias": True}),
        **{"swiglu": False, "gated": True, "activation": "quick-gelu"},
        **{"activation_func_clamp_value": 0.05, "glu_linear_offset": 1.0, "add_attention_output_bias": True},
    },
    "nemotron": {
        **(_ROPE | {"rotary_percent": 0.5, "normalization": "LayerNorm", "apply_layernorm_1p": True, "swiglu": False}),
        **{"activation": "squared-relu", "use_rope_scaling": True},
    },
    "post": {"norm_placement": "post", "swiglu": False, "activation": "gelu", "add_mlp_bias": True},
    "phi3": {**_ROPE, "rope_scaling": _LONG, "softmax_type": "off-by-one", "scale_attn_by_inverse_layer_idx": True},
    "residual of norms": {
        **(_ROPE | {"apply_residual_connection_post_layernorm": True, "no_rope_freq": "2"}),
        **{"tiled_mlp": 3, "tiled_loss": 4},  # 3 do not divide the rows of a rank
    },
}


@dataclass(frozen=True)
class OptionCase:
    """A bundle in a layout."""

    bundle: str
    case: Case

    @property
    def choices(self) -> tuple:
        return (self.bundle, *self.case.choices)

    @property
    def ranks(self) -> int:
        return self.case.ranks

    def __str__(self) -> str:
        return f"{self.bundle.replace(' ', '')}-{self.case}"


OPTION_DIMENSIONS = ("bundle", *DIMENSIONS)


def option_cases() -> Iterator[OptionCase]:
    """Every bundle in layouts and models in which every pair of choices occurs."""
    for case in covering_cases(2):
        yield from (OptionCase(bundle, case) for bundle in BUNDLES)


def option_model(case: OptionCase) -> ModelConfig:
    options = dict(BUNDLES[case.bundle])
    if case.case.corner == "head norms" and options.get("norm_bias", True):
        options.pop("no_rope_freq", None)  # without a rotation the gradient of a key's bias is zero but for rounding
    return replace(model_of(case.case), **options)


def worst_difference_of(case: OptionCase, compile: str = "off", steps: int = 2) -> tuple[float, str]:
    """The largest difference from one process, run eagerly, and where it is."""
    config, texts = option_model(case), texts_of(case.case)
    shared = {"global_batch": case.case.global_batch, "texts": texts, "steps": steps}
    got = run(replace(config, compile=compile), layout_of(case.case), **shared)
    return worst_of(got, one_process(config, **shared))


def _sharded(stage: int) -> dict[str, Layout]:
    """A ZeRO stage with data parallel ranks alone, with overlap and buckets; with tensor and with pipeline parallel ranks."""
    overlap = DataParallelConfig(zero_stage=stage, overlap_grad_reduce=True, ddp_bucket_size=1500)
    plain = DataParallelConfig(zero_stage=stage)
    beside = {f"zero{stage}-tp2sp-dp2": Layout(tp=2, sp=True, dp=2, data_parallel=plain)}
    beside |= {f"zero{stage}-pp2-dp2": Layout(pp=2, dp=2, m=2, data_parallel=plain)} if stage == 1 else {}
    return {f"zero{stage}-dp2": Layout(dp=2, m=2, data_parallel=overlap)} | beside


# Axes that the layout space has not: ZeRO stages and context parallelism.
OTHER_LAYOUTS: dict[str, Layout] = {
    **(_sharded(1) | _sharded(2) | _sharded(3)),
    **{f"cp2-{kind}": Layout(cp=2, cp_types=(kind,)) for kind in ("p2p", "all_gather", "a2a")},
    "cp2-tp2-p2p": Layout(cp=2, tp=2),
    "cp2-pp2-all_gather": Layout(cp=2, pp=2, m=2, cp_types=("all_gather",)),
    "cp2-zero3-p2p": Layout(cp=2, dp=2, data_parallel=DataParallelConfig(zero_stage=3)),
}


def worst_difference_in(layout: Layout, bundle: str, steps: int = 2) -> tuple[float, str]:
    """As `worst_difference_of`, of a bundle over Llama's style."""
    config, shared = replace(TINY_LLAMA, **BUNDLES[bundle]), {"global_batch": 12, "steps": steps}
    return worst_of(run(config, layout, **shared), run(config, Layout(), **shared))
