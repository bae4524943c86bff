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
    # What an iteration counts among those, in a run that counts iterations: its first batch size, so that with another one
    # the schedules keep their place. 0: not known yet, or the run counts samples.
    samples_per_iter: int = 0
    requested_train_samples: int = 0  # what the order of the data was made for: another request may give another order
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)  # of learning rate and weight decay, as numbers

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        iteration, consumed = int(saved["iteration"]), int(saved["consumed_train_samples"])
        return cls(
            iteration,
            consumed,
            int(saved.get("scheduled_train_samples", consumed)),
            int(saved.get("samples_per_iter", consumed // max(iteration, 1))),  # older checkpoints do not say
            int(saved.get("requested_train_samples", 0)),
            dict(saved.get("schedules", {})),
        )
