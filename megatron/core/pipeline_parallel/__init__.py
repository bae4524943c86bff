"""Pipeline parallelism: schedules as data, the executor that runs them, and the driver of a step.

    stage, schedule, zero_bubble_v, table    on paper (no torch): layers of a stage, lists of actions, schedules by name
    lower, simulate, plot                    transfers, times, drawings
    executor, transport, loss                one rank's list on tensors
    pipeline, own_loop                       a step of training or of evaluation; of a loop of one's own

May import: floors 0 and 1; no other mechanism. Names load on first use.
To add a schedule: a function of integers and a line of `SCHEDULES`, also from a script; its lists place the stages.
"""

from megatron.core.base.lazy_imports import lazy_names

# The function `simulate` is not exported: importing the submodule of that name would replace it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.parallel.stage_map": "StageMap loop",
        ".layer_split": "split_layers",
        "megatron.core.pipeline_parallel.schedule.registry": "SCHEDULES stage_map default_chunks",
        "megatron.core.pipeline_parallel.schedule.actions": "stages_in Op Action Schedule gpipe one_f_one_b interleaved zb_h1 zb_interleaved "
        "defer_weight_grads forward_only forwards_over",
        "megatron.core.pipeline_parallel.schedule.zb_v": "zb_v",
        "megatron.core.pipeline_parallel.schedule.lower": "add_transfers add_reduce check_rendezvous partner DIRECTION_OF",
        "megatron.core.pipeline_parallel.schedule.simulate": "make_schedule bubble bubble_in_theory peak_live peak_live_in_theory peak_bytes show",
        "megatron.core.pipeline_parallel.schedule.plot": "plot_text plot_svg chrome_trace",
        "megatron.core.classic.schedules": "get_forward_backward_func",
    },
)
