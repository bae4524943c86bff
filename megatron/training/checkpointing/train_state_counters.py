"""The position of a run: everything in a checkpoint that is neither a tensor nor a setting."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.convert.hf_provenance_and_tokenizer_files import Provenance


@dataclass
class TrainState:
    """Counts since the start of the run, over all restarts."""

    iteration: int = 0  # steps done
    consumed_train_samples: int = 0
    scheduled_train_samples: int = 0  # without skipped steps; the learning rate follows this count
    # With --train-iters: scheduled samples per iteration, the run's first batch size. It stays when the batch size changes,
    # so the schedules keep their position. 0: not known yet, or the run has --train-samples.
    samples_per_iter: int = 0
    requested_train_samples: int = 0  # from the data set; its order may depend on this number
    skipped_train_samples: int = 0  # of the consumed ones, those that --iterations-to-skip has left out
    # The parameters of the schedules of learning rate and weight decay.
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    guard: dict[str, dict[str, Any]] = field(default_factory=dict)  # what losses and gradients are compared with
    # The iterations below --save that this run, over all restarts, has saved or resumed from, and has not deleted. It is not
    # part of the position, so a checkpoint holds it beside the train state.
    checkpoints: list[int] = field(default_factory=list, compare=False)
    # The folder from which the model was made; a checkpoint holds it beside the train state, too.
    origin: Provenance | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the position as plain JSON: the fields that a checkpoint holds under "train"."""
        return {name: value for name, value in asdict(self).items() if name not in ("checkpoints", "origin")}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        """Return the position that `as_json` has given; older checkpoints lack some of the fields."""
        iteration = int(saved["iteration"])
        consumed = int(saved["consumed_train_samples"])
        return cls(
            iteration,
            consumed,
            int(saved.get("scheduled_train_samples", consumed)),
            int(saved.get("samples_per_iter", consumed // max(iteration, 1))),
            int(saved.get("requested_train_samples", 0)),
            int(saved.get("skipped_train_samples", 0)),
            dict(saved.get("schedules", {})),
            dict(saved.get("guard", {})),
        )
