"""Output of tools/estimate_memory.py: the prediction as a table or JSON, or the measurement beside it."""

import json
import sys
from collections.abc import Sequence

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.memory.dry_run_of_one_rank import Job
from megatron.training.memory.forecast_memory_along_schedule import forecast, predicted_of, profiles_of
from megatron.training.memory.params_flops_bytes_by_layer import by_layer_report, costs_as_json, layer_costs
from megatron.training.memory.predicted_memory_table import as_json, full_report
from tools.estimating.job import own_flags_in, read
from tools.estimating.measure import measure, measured_report


def prediction_lines(job: Job, as_text_of_json: bool) -> list[str]:
    """Return the lines of the prediction by stage."""
    ranks = forecast(job)
    return [json.dumps(as_json(job, ranks), indent=1)] if as_text_of_json else full_report(job, ranks)


def layer_lines(job: Job, as_text_of_json: bool) -> list[str]:
    """Return the lines of the prediction by stage, and of the costs of each layer."""
    profiles = profiles_of(job, by_module=True)
    ranks = [predicted_of(profile, pp_rank) for pp_rank, profile in enumerate(profiles)]
    costs = layer_costs(job, profiles)
    if as_text_of_json:
        return [json.dumps(as_json(job, ranks) | {"by_layer": costs_as_json(costs)}, indent=1)]
    return [*full_report(job, ranks), *by_layer_report(job, costs)]


def run(words: Sequence[str]) -> int:
    """Print the prediction for a command line; return 0, or 2 after an error in the flags."""
    try:
        tool_flags = own_flags_in(words)
        if tool_flags.rank is not None and not tool_flags.measure:
            raise ConfigError(
                f"--rank {tool_flags.rank} is the rank that --measure trains; add --measure, or leave it out"
            )
        if tool_flags.measure and tool_flags.by_layer:
            raise ConfigError("--by-layer lists what is predicted, and --measure trains one rank; leave one out")
        if tool_flags.measure:
            lines = measured_report(measure(words))
        else:
            job, args = read(words)
            lines = layer_lines(job, args.json) if args.by_layer else prediction_lines(job, args.json)
    except ConfigError as error:
        problems = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot estimate, {len(error.problems)} problem(s):\n{problems}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0
