"""Output of tools/estimate_memory.py: the prediction as a table or JSON, or the measurement beside it."""

import json
import sys
from collections.abc import Sequence

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.memory.peak_along_schedule import forecast
from megatron.training.memory.predicted_memory_table import as_json, full_report
from tools.estimating.job import own_flags_in, read
from tools.estimating.measure import measure, measured_report


def run(words: Sequence[str]) -> int:
    """Print the prediction for a command line; return 0, or 2 after an error in the flags."""
    try:
        tool_flags = own_flags_in(words)
        if tool_flags.rank is not None and not tool_flags.measure:
            raise ConfigError(
                f"--rank {tool_flags.rank} is the rank that --measure trains; add --measure, or leave it out"
            )
        if tool_flags.measure:
            lines = measured_report(measure(words))
        else:
            job, args = read(words)
            ranks = forecast(job)
            lines = [json.dumps(as_json(job, ranks), indent=1)] if args.json else full_report(job, ranks)
    except ConfigError as error:
        problems = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot estimate, {len(error.problems)} problem(s):\n{problems}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0
