"""The settings of the hang watch, which looks for ranks without progress. Pure."""

from dataclasses import dataclass

from megatron.core.base.dataclass_flags import FlagConfig, NotNegative, Positive, option


@dataclass(frozen=True)
class HangConfig(FlagConfig):
    """Hangs."""

    hang_timeout: NotNegative = option(
        10.0,
        "a rank without progress for this many times the median step, and for --hang-timeout-floor seconds, hangs: the job "
        "reports it and ends with code 4; 0: no check for hangs",
        metavar="TIMES",
    )
    hang_timeout_floor: Positive = option(
        180.0,
        "seconds without progress before a rank may count as hung; in start-up and saves, before it is examined",
        metavar="SECONDS",
    )
