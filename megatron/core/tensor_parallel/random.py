"""Megatron's path of its generators and of `checkpoint`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {"megatron.core.classic.random": "RngTracker checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed"},
)
