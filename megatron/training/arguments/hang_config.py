"""The settings of the hang watch, which looks for ranks without progress. Pure."""

from dataclasses import dataclass

from megatron.core.base.dataclass_flags import FlagConfig, NotNegative, Positive, option


@dataclass(frozen=True)
class HangConfig(FlagConfig):
    """Hangs."""

    hang_timeout: NotNegative = option(
        10.0,
        "a rank counts as hung after no progress for this many times the median step time, and for at least "
        "--hang-timeout-floor seconds; the job then reports the rank and exits with code 4; 0: no check for hangs",
        metavar="TIMES",
    )
    hang_timeout_floor: Positive = option(
        180.0,
        "minimum number of seconds without progress before a rank counts as hung; during start-up and saves, number of "
        "seconds without progress before a rank is examined",
        metavar="SECONDS",
    )
