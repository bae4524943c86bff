"""How many samples a run asks its data sets for, and whether those it got will do. Numbers in, words out."""

from typing import Any

from megatron.core.config import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_map import parse_split, requested_samples
from megatron.training.resume.state import TrainState
from megatron.training.settings.config import TrainingConfig


def samples_to_request(training: TrainingConfig, train_iters: int, batch_size: int, state: TrainState) -> list[int]:
    """Samples of [train, valid, test] for a run that goes on from `state`, with `batch_size` samples a step at its end.

    A run asks for no fewer training samples than before it was stopped: data sets may be shuffled by how much is asked
    for, and the order is to stay.
    """
    counts = requested_samples(
        train_iters,
        training.eval_interval,
        training.eval_iters,
        batch_size,
        iteration=state.iteration,
        consumed=state.consumed_train_samples,
    )
    return [max(training.train_samples or counts[0], state.requested_train_samples), *counts[1:]]


SPLITS = ("train", "valid", "test")


def check_datasets(datasets: Any, steps: int, needed: int, state: TrainState) -> dict[str, Any]:
    """`datasets` as a provider returned them, by split, the first with the `needed` samples of `steps` more steps.

    Raises ConfigError otherwise.
    """
    if not isinstance(datasets, tuple | list) or len(datasets) != 3:
        given = f"{len(datasets)} of them" if isinstance(datasets, tuple | list) else type(datasets).__name__
        raise ConfigError(
            f"train_valid_test_datasets_provider must return three data sets, None for one that is not there, not {given}"
        )
    train = datasets[0]
    if steps > 0 and train is None:
        raise ConfigError(
            f"there are {steps} iterations to train, and no training data: give --split a first share above 0"
        )
    if steps > 0 and len(train) < needed:
        consumed = state.consumed_train_samples
        after = f" after the {consumed} already consumed" if consumed else ""
        raise ConfigError(
            f"the training set has {len(train)} samples, but {steps} iterations of {needed - consumed} samples together{after} "
            f"need {needed}; use more data, or lower --train-iters (--train-samples) or --global-batch-size"
        )
    return dict(zip(SPLITS, datasets))


def notes_of_no_validation(training: TrainingConfig, data: DataConfig, datasets: dict[str, Any]) -> list[str]:
    """What a run says that is asked to validate and has no data set for it."""
    if datasets["valid"] is not None or training.eval_iters == 0:
        return []
    nothing = "nothing is validated" if datasets["test"] is not None else "nothing is validated or tested"
    is_zero = not data.has_own_splits and parse_split(data.split_shares)[1] == 0
    advice = (
        f"; --split {data.split_shares} leaves it no share; give the second one above 0"
        if is_zero
        else "; give --valid-data-path, or data of more documents, each of which belongs to one split as a whole"
    )
    return [f"no validation set: {nothing}, whatever --eval-iters ({training.eval_iters}){advice}"]
