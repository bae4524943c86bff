"""Scripts and forks of others: what of them is here (`megatron.doctor`), and a cluster's script on a CPU (`megatron.on_cpu`).

names_used_by_fork             the names that Python files use of `megatron`
flags_in_launch_scripts        the flags that launch scripts pass
judge_fork_names_and_flags     whether these are here, and what to change
map_cuda_to_cpu                torch's names of CUDA and NCCL, replaced by the CPU and gloo
"""
