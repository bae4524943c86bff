"""Where a run stands: all that is neither a tensor nor a setting."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Counts since the start of the run, over all restarts."""

    iteration: int = 0  # steps done
    consumed_train_samples: int = 0
    scheduled_train_samples: int = 0  # consumed by steps that were not skipped: the learning rate follows these
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)  # of learning rate and weight decay, as numbers

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        consumed = int(saved["consumed_train_samples"])
        return cls(
            int(saved["iteration"]),
            consumed,
            int(saved.get("scheduled_train_samples", consumed)),
            dict(saved.get("schedules", {})),
        )
