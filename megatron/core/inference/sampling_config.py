"""The settings of sampling. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from megatron.core.base.dataclass_flags import Count, FlagConfig, Positive, option


@dataclass(frozen=True)
class SamplingConfig(FlagConfig):
    """Choice of the next token."""

    greedy: bool = option(False, "take the most probable token")
    temperature: Positive = option(
        1.0,
        "temperature: divide logits by this; below 1 sharpens the distribution, above 1 flattens it; instead of "
        "0 give --greedy",
    )
    top_k: Count | None = option(None, "sample from the k most probable tokens", flags=("--top-k", "--top_k"))
    top_p: Annotated[float, "(0, 1]"] | None = option(
        None, "sample from the smallest set of tokens with at least this probability", flags=("--top-p", "--top_p")
    )

    def problems(self) -> Iterator[str]:
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            yield (
                "--greedy takes the most probable token, so --temperature, --top-k and --top-p have no effect; "
                "leave them out, or --greedy"
            )
