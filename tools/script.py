"""A top-level script, up to its call of `pretrain`: tools take its model, flags, defaults and tables from there."""

import runpy
import sys
from pathlib import Path

from megatron.console_scripts import programs_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.training import training
from megatron.training.training import Script


class _ReadyToTrain(Exception):
    """Ends a script where its training would begin."""


def script_at(model: str) -> Script:
    """What the script gives `pretrain`. It runs up to that call as in a job; what it adds to tables stays.

    model: gpt, bert, t5, or the path of a script. Raises ConfigError if there is no such script, or if it does not call
    `pretrain`.
    """
    path = programs_folder() / f"pretrain_{model}.py" if model in ("gpt", "bert", "t5") else Path(model)
    if not path.is_file():
        raise ConfigError(
            f"--model is {model}; it must be gpt, bert, t5, or the path of a script such as pretrain_gpt.py"
        )

    def taken(script: Script) -> None:
        raise _ReadyToTrain(script)

    # Replaced where `pretrain` looks it up, so it does not matter from where the script imports `pretrain`.
    before = training.run_script, sys.argv, list(sys.path)
    training.run_script, sys.argv = taken, [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except _ReadyToTrain as reached:
        return reached.args[0]
    finally:
        training.run_script, sys.argv = before[:2]
        sys.path[:] = before[2]
    raise ConfigError(f"--model {model} has ended without a call of pretrain(), which names its model; add the call")
