"""Pipeline parallelism: schedules as data, the executor that runs them, and the driver of a step.

    schedule/                    lists of actions, made of integers (no torch)
    layer_split                  the layers of each stage (no torch)
    executor, stage_transport    one rank's list run on tensors; transfers between stages
    loss_func_results            the losses of forward steps as sums and counts
    schedules                    drives a step: `Pipeline`, and Megatron's `get_forward_backward_func`

To add a schedule: a function of integers and a line of `SCHEDULES`, also from a script.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.parallel.stage_to_rank import StageMap as StageMap, loop as loop
    from megatron.core.pipeline_parallel.layer_split import split_layers as split_layers
    from megatron.core.pipeline_parallel.schedule.actions import (
        Action as Action,
        Op as Op,
        Schedule as Schedule,
        stages_in as stages_in,
    )
    from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
        forward_only as forward_only,
        forwards_over as forwards_over,
        gpipe as gpipe,
        interleaved as interleaved,
        one_f_one_b as one_f_one_b,
        split_and_defer_weight_grads as split_and_defer_weight_grads,
        zb_h1 as zb_h1,
        zb_interleaved as zb_interleaved,
    )
    from megatron.core.pipeline_parallel.schedule.lower import (
        DIRECTION_OF as DIRECTION_OF,
        add_reduce as add_reduce,
        add_transfers as add_transfers,
        check_rendezvous as check_rendezvous,
        partner as partner,
    )
    from megatron.core.pipeline_parallel.schedule.plot import (
        Timeline as Timeline,
        chrome_trace as chrome_trace,
        plot_svg as plot_svg,
        plot_svg_of_several as plot_svg_of_several,
        plot_text as plot_text,
    )
    from megatron.core.pipeline_parallel.schedule.registry import (
        SCHEDULES as SCHEDULES,
        default_chunks as default_chunks,
        stage_map as stage_map,
    )
    from megatron.core.pipeline_parallel.schedule.simulate import (
        bubble as bubble,
        bubble_in_theory as bubble_in_theory,
        make_schedule as make_schedule,
        peak_bytes as peak_bytes,
        peak_live as peak_live,
        peak_live_in_theory as peak_live_in_theory,
        show_around as show_around,
    )
    from megatron.core.pipeline_parallel.schedule.zb_v import zb_v as zb_v
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as get_forward_backward_func

# The function `simulate` is not exported: importing the submodule of that name would replace it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.parallel.stage_to_rank": "StageMap loop",
        ".layer_split": "split_layers",
        ".schedule.registry": "SCHEDULES stage_map default_chunks",
        ".schedule.actions": "stages_in Op Action Schedule",
        ".schedule.gpipe_1f1b_zb_h1": "gpipe one_f_one_b interleaved zb_h1 zb_interleaved split_and_defer_weight_grads "
        "forward_only forwards_over",
        ".schedule.zb_v": "zb_v",
        ".schedule.lower": "add_transfers add_reduce check_rendezvous partner DIRECTION_OF",
        ".schedule.simulate": (
            "make_schedule bubble bubble_in_theory peak_live peak_live_in_theory peak_bytes show_around"
        ),
        ".schedule.plot": "Timeline plot_text plot_svg plot_svg_of_several chrome_trace",
        ".schedules": "get_forward_backward_func",
    },
)
