"""Options of a model that cannot stand together are refused, each with the flags to change."""

import pytest

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.command_line import parse_args

ROPE = "--position-embedding-type rope "
REFUSED = {
    "--rotary-interleaved": "--position-embedding-type rope",
    ROPE + "--use-rope-scaling --rotary-seq-len-interpolation-factor 2": "exclude each other",
    ROPE + "--rope-scaling-factor 4": "--use-rope-scaling",
    ROPE + "--rotary-base-of-windows 100": "--window-size",
    ROPE + "--no-rope-freq [1,0]": "2 entries",
    ROPE + "--rope-scaling yarn": "is not a scaling of frequencies",
    ROPE + '--rope-scaling {"rope_type":"su","factor":2}': "linear, dynamic, llama3, yarn, longrope",
    ROPE + '--rope-scaling {"rope_type":"yarn","factor":2}': "original_max_position_embeddings",
    ROPE + '--rope-scaling {"rope_type":"linear","factor":0}': "positive",
    "--swiglu --activation relu": "--activation",
    "--swiglu --gated": "--swiglu",
    "--activation-func-clamp-value 7": "--gated or --swiglu",
    "--glu-linear-offset 1": "--gated or --swiglu",
    "--no-norm-bias --normalization RMSNorm": "--no-norm-bias",
    "--qk-norm-over width": "--qk-layernorm",
    "--qk-layernorm --qk-norm-over width": "RMSNorm",
    "--norm-placement post --apply-residual-connection-post-layernorm": "leave one of them out",
    "--norm-placement branch --recompute-granularity selective --recompute-modules layernorm": "--norm-placement branch",
    "--softmax-type soft": "vanilla, off-by-one, learnable",
    "--squared-relu --activation gelu": "contradicts",
}


@pytest.mark.parametrize("line", REFUSED)
def test_options_that_cannot_stand_together_are_refused(line: str):
    with pytest.raises(ConfigError) as caught:
        parse_args(line.split())
    assert any(REFUSED[line] in problem for problem in caught.value.problems), caught.value.problems
