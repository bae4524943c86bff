"""Pipeline parallelism: schedules as data, the executor that runs them, and the driver of a step.

    schedule/                           lists of actions, made of integers (no torch)
    layer_split                         the layers of each stage (no torch)
    executor, stage_transport           one rank's list on tensors; what stages send to one another
    microbatch_loss                     results of forward steps as sums and counts
    pipeline_driver, forward_backward   a step of training or of evaluation; a step of a script's own loop
    schedules                           Megatron's `get_forward_backward_func`

To add a schedule: a function of integers and a line of `SCHEDULES`, also from a script.
"""

from megatron.core.base.lazy_imports import lazy_names

# The function `simulate` is not exported: importing the submodule of that name would replace it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.parallel.stage_map": "StageMap loop",
        ".layer_split": "split_layers",
        ".schedule.registry": "SCHEDULES stage_map default_chunks",
        ".schedule.actions": "stages_in Op Action Schedule gpipe one_f_one_b interleaved zb_h1 zb_interleaved "
        "defer_weight_grads forward_only forwards_over",
        ".schedule.zb_v": "zb_v",
        ".schedule.lower": "add_transfers add_reduce check_rendezvous partner DIRECTION_OF",
        ".schedule.simulate": ("make_schedule bubble bubble_in_theory peak_live peak_live_in_theory peak_bytes show"),
        ".schedule.plot": "plot_text plot_svg chrome_trace",
        ".schedules": "get_forward_backward_func",
    },
)
