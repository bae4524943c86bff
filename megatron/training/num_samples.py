"""How many samples a run requests from its data sets, and checks of the data sets it gets. Pure."""

from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_map import parse_split, requested_samples
from megatron.training.arguments.config import Config, TrainingConfig
from megatron.training.checkpointing.train_state import TrainState


def samples_to_request(
    training: TrainingConfig, data: DataConfig, train_iters: int, batch_size: int, state: TrainState
) -> list[int | None]:
    """Samples of [train, valid, test] for a run resumed at `state`. batch_size: global, at the end of a ramp.

    None for a validation set that is read whole: one epoch, or where data are made up, --eval-iters batches. A resumed run
    requests at least as many training samples as before, as a data set's order may depend on the number requested.
    """
    interval, iters = training.eval_interval, training.eval_iters
    done = {"iteration": state.iteration, "consumed": state.consumed_train_samples}
    counts = requested_samples(train_iters, interval, iters, batch_size, **done)
    train = max(training.train_samples or counts[0], state.requested_train_samples)
    valid = whole_set(data, iters * batch_size) if data.full_validation else counts[1]
    return [train, valid, counts[2]]


def whole_set(data: DataConfig, made_up: int) -> int | None:
    """The samples to request of a validation set that --full-validation reads: None for one epoch, or so many made-up
    ones."""
    return made_up if data.mock_data else None


SPLITS = ("train", "valid", "test")


def check_datasets(datasets: Any, steps: int, needed: int, state: TrainState) -> dict[str, Any]:
    """A provider's data sets by split, of validation perhaps a list of several.

    Raises ConfigError unless there are three, with `needed` samples for `steps` steps."""
    if not isinstance(datasets, tuple | list) or len(datasets) != 3:
        given = f"{len(datasets)} of them" if isinstance(datasets, tuple | list) else type(datasets).__name__
        raise ConfigError(
            f"train_valid_test_datasets_provider must return three data sets (None for a missing set), not {given}"
        )
    train = datasets[0]
    if steps > 0 and train is None:
        raise ConfigError(f"no training data for {steps} iterations: give --split a first share above 0")
    if steps > 0 and len(train) < needed:
        consumed = state.consumed_train_samples
        after = f" after the {consumed} already consumed" if consumed else ""
        raise ConfigError(
            f"the training set has {len(train)} samples, but {steps} iterations with {needed - consumed} samples{after} "
            f"need {needed}; use more data, or lower --train-iters (--train-samples) or --global-batch-size"
        )
    return dict(zip(SPLITS, datasets))


def notes_of_no_validation(config: Config, datasets: dict[str, Any]) -> list[str]:
    """The note of a run that should validate, but has no validation set."""
    training, data = config.training, config.data
    if datasets["valid"] is not None or not config.validates:
        return []
    nothing = "nothing is validated" if datasets["test"] is not None else "nothing is validated or tested"
    is_zero = not data.has_own_splits and parse_split(data.split_shares)[1] == 0
    advice = "; give --valid-data-path, or data with more documents: splits are divided between documents"
    if is_zero:
        advice = f"; --split {data.split_shares} leaves it no share; give a second share above 0"
    return [f"no validation set: {nothing}, whatever --eval-iters ({training.eval_iters}){advice}"]
