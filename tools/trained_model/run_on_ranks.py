"""Start and end of tools that run a trained model on the ranks of a launcher: process group, one-line errors, exit status."""

import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError, problems_of
from megatron.core.base.tolerate_broken_output import READER_ENDED, answers_failed
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error, write_error_file
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.rank_grid import Axis
from megatron.training.global_vars import set_runtime
from tools.trained_model.flags import RefusedFlags
from tools.trained_model.load import ModelSettings


class HasModelSettings(Protocol):
    """The settings of such a tool."""

    @property
    def model(self) -> ModelSettings: ...


Settings = TypeVar("Settings", bound=HasModelSettings)


def run_on_ranks(
    tool: str,
    read_settings: Callable[[list[str] | None], Settings],
    run: Callable[[Settings, Axis], None],
    arguments: list[str] | None,
) -> int:
    """Read the settings on each rank, start the process group, call `run`, and return the exit status.

    0: success. 2: an error in the flags, also one that only the model of --load shows. 1: another error that the user can
    correct. The first rank prints the error as one line that begins with the tool's name.
    """
    settings = None
    flag_error = None
    try:
        settings = read_settings(arguments)
    except ConfigError as error:
        flag_error = error  # raised below, when the ranks can tell each other
    try:
        timeout = settings.model.config.distributed_timeout_minutes if settings else 10
        if parallel_state.launched_world_size() > 1:
            local_rank = parallel_state.launched_local_rank()
            device = settings.model.device if settings else Device.select(local_rank=local_rank)
            parallel_state.start_distributed(device.backend, timeout)
        with collectives.raise_together(parallel_state.agreement_axis()):
            if flag_error is not None:
                raise flag_error
        run(settings, parallel_state.world_axis())
    except BrokenPipeError:
        if not answers_failed():
            raise
        return READER_ENDED
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError, ImportError, collectives.PeerError) as error:
        if isinstance(error, ValueError) and not is_user_error(error):
            raise
        problems = problems_of(error)
        if isinstance(error, OSError) and answers_failed():
            problems = [f"standard output cannot be written: {error.strerror}"]
        message = f"{tool}: {'; '.join(line.strip() for problem in problems for line in problem.splitlines())}"
        write_error_file(message)
        if parallel_state.launched_rank() == 0:
            print(message, file=sys.stderr)
        return 2 if settings is None or isinstance(error, RefusedFlags) else 1
    finally:
        set_runtime(None)
        parallel_state.stop_distributed()
    return 0
