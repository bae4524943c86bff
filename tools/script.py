"""Run a training script up to its call of `pretrain`: a tool then has its model, flags, defaults and registries."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.console_scripts import programs_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.training import training
from megatron.training.global_vars import set_parsed_first
from megatron.training.training import Script


class _ReadyToTrain(Exception):
    """Raised in place of the training, to end the script there. Its argument is the Script."""


def script_at(model: str, flags: Sequence[str] = ()) -> Script:
    """Run a script up to its call of `pretrain`; return the arguments of that call.

    model: gpt, bert, t5, or the path of a script. flags: its command line, which a script may parse by itself before the
    call. Entries that the script adds to registries remain after the call.
    Raises ConfigError if there is no such script, or if it does not call `pretrain`.
    """
    path = programs_folder() / f"pretrain_{model}.py" if model in ("gpt", "bert", "t5") else Path(model)
    if not path.is_file():
        raise ConfigError(
            f"--model is {model}; it must be gpt, bert, t5, or the path of a script such as pretrain_gpt.py"
        )

    def stop_before_training(script: Script) -> None:
        raise _ReadyToTrain(script)

    saved_run_script = training.run_script
    saved_argv = sys.argv
    saved_path = list(sys.path)
    # `pretrain` looks run_script up in its module, so this works from wherever the script imports `pretrain`.
    training.run_script = stop_before_training
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.resolve().parent))  # as `python path` does
    try:
        runpy.run_path(str(path), run_name="__main__")
    except _ReadyToTrain as ready:
        return ready.args[0]
    finally:
        training.run_script = saved_run_script
        set_parsed_first(None)
        sys.argv = saved_argv
        sys.path[:] = saved_path
    raise ConfigError(f"--model {model} has ended without a call of pretrain(), which names its model; add the call")
