"""Pipeline parallelism: schedules as data, and the executor that runs them.

Names are imported when first asked for, so that all but the executor and what it needs loads without torch.
"""

from megatron.core.lazy import lazy_names

# The function `simulate` is not here: the submodule of that name would shadow it as soon as anything imports it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "loop_placement": "stage",
        "stages_of_rank": "stage",
        "layers_of_stage": "stage",
        "split_layers": "stage",
        "Op": "schedule",
        "Action": "schedule",
        "Schedule": "schedule",
        "gpipe": "schedule",
        "one_f_one_b": "schedule",
        "interleaved": "schedule",
        "zb_h1": "schedule",
        "defer_weight_grads": "schedule",
        "forward_only": "schedule",
        "SCHEDULES": "schedule",
        "add_transfers": "lower",
        "add_reduce": "lower",
        "check_rendezvous": "lower",
        "partner": "lower",
        "DIRECTION_OF": "lower",
        "make_schedule": "simulate",
        "bubble": "simulate",
        "bubble_in_theory": "simulate",
        "peak_live": "simulate",
        "peak_live_in_theory": "simulate",
        "peak_bytes": "simulate",
        "show": "simulate",
        "plot_text": "plot",
        "plot_svg": "plot",
        "chrome_trace": "plot",
        "get_forward_backward_func": "schedules",
    },
)
