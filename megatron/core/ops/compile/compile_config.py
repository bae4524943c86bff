"""The setting of torch.compile. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import FlagConfig, option


@dataclass(frozen=True)
class CompileConfig(FlagConfig):
    """Compilation by torch.compile."""

    compile: Literal["off", "regions", "layers"] = option(
        "off",
        "what torch.compile compiles: regions: the operations between matrix products (norms, activations, rotary "
        "positions, cross entropy); layers: whole layers, or regions where a layer cannot be compiled, with the "
        "reason in the log. Needs a C++ compiler on a CPU and Triton on other devices; if that is missing, nothing is "
        "compiled",
    )
