"""A run requests a number of samples from its data sets, and checks the data sets that it gets. Pure."""

from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_map import parse_split, requested_samples
from megatron.training.arguments.config import Config, TrainingConfig
from megatron.training.checkpointing.train_state_counters import TrainState


def samples_to_request(
    training: TrainingConfig, data: DataConfig, train_iters: int, batch_sizes: tuple[int, int], state: TrainState
) -> list[int | None]:
    """Return the samples of [train, valid, test] for a run resumed at `state`.

    batch_sizes: global, of training at the end of a ramp and of validation. None for a validation set that is read
    whole, which is one epoch; with mock data --eval-iters batches instead. A resumed run requests at least as many
    training samples as before, as a data set's order may depend on the number requested.
    """
    train_size, eval_size = batch_sizes
    train, valid, test = requested_samples(
        train_iters,
        training.eval_interval,
        training.eval_iters,
        train_size,
        eval_batch_size=eval_size,
        iteration=state.iteration,
        consumed=state.consumed_train_samples,
        start_eval_at_iter=training.start_eval_at_iter,
    )
    train = max(training.train_samples or train, state.requested_train_samples)
    if data.full_validation:
        valid = samples_of_whole_set(data, training.eval_iters * eval_size)
    return [train, valid, test]


def samples_of_whole_set(data: DataConfig, mock_samples: int) -> int | None:
    """Return the samples to request of a validation set that --full-validation reads: None for one epoch.

    Mock data have no end, so they get a number.
    """
    return mock_samples if data.mock_data else None


SPLITS = ("train", "valid", "test")


def check_datasets(datasets: Any, steps: int, needed: int, state: TrainState) -> dict[str, Any]:
    """Return a provider's data sets by split; for validation possibly a list of several.

    Raises ConfigError unless there are three, and training has `needed` samples for `steps` steps.
    """
    if not isinstance(datasets, tuple | list) or len(datasets) != 3:
        returned = type(datasets).__name__
        if isinstance(datasets, tuple | list):
            returned = f"{len(datasets)} of them"
        raise ConfigError(
            f"train_valid_test_datasets_provider must return three data sets (None for a missing set), not {returned}"
        )
    train = datasets[0]
    if steps > 0 and train is None:
        raise ConfigError(f"no training data for {steps} iterations; give --split a first share above 0")
    if steps > 0 and len(train) < needed:
        consumed = state.consumed_train_samples
        after = f" after the {consumed} already consumed" if consumed else ""
        raise ConfigError(
            f"the training set has {len(train)} samples, but {steps} iterations with {needed - consumed} "
            f"samples{after} need {needed}; use more data, or lower --train-iters (--train-samples) or "
            "--global-batch-size"
        )
    return dict(zip(SPLITS, datasets))


def notes_of_no_validation(config: Config, datasets: dict[str, Any]) -> list[str]:
    """Return the note of a run that should validate, but has no validation set."""
    data = config.data
    if datasets["valid"] is not None or not config.validates:
        return []

    # the effect
    effect = "nothing is validated"
    if datasets["test"] is None:
        effect = "nothing is validated or tested"

    # the reason
    advice = "; give --valid-data-path, or data with more documents: splits are divided between documents"
    if not data.has_own_splits and parse_split(data.split_shares)[1] == 0:
        advice = f"; --split {data.split_shares} leaves it no share; give a second share above 0"
    return [f"no validation set: {effect}, whatever --eval-iters ({config.training.eval_iters}){advice}"]
