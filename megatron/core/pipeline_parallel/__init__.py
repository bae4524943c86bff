"""Pipeline parallelism: schedules as data, the executor that runs them, and the driver of a step.

A new schedule is a function and a line in `SCHEDULES` (`schedule.py`). Names are imported on first use, so that schedules,
lowering, simulation and plots load without torch.
"""

from megatron.core.lazy import lazy_names

# The function `simulate` is not exported: importing the submodule of that name would replace it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.stage_map": "StageMap loop",
        ".stage": "split_layers",
        ".schedule": "SCHEDULES stage_map stages_in Op Action Schedule gpipe one_f_one_b interleaved zb_h1 "
        "defer_weight_grads forward_only forwards_over",
        ".lower": "add_transfers add_reduce check_rendezvous partner DIRECTION_OF",
        ".simulate": "make_schedule bubble bubble_in_theory peak_live peak_live_in_theory peak_bytes show",
        ".plot": "plot_text plot_svg chrome_trace",
        "megatron.core.classic.schedules": "get_forward_backward_func",
    },
)
