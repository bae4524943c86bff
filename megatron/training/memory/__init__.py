"""Memory is predicted before a run starts, and measured while it runs.

fake_tensor_mode                 tensors without values, and fake groups in place of the other ranks
dry_run                          the step of one rank, by the script's own code: what each action adds, and its peak
peak_along_schedule              the prediction: the same along the schedule of every pipeline rank
predicted_memory_table           prints it
by_layer                         parameters, FLOPs and bytes of each layer
track_memory_by_kind             live bytes by kind, as tensors are created and freed; `memory_monitor` prints them
memory_advice, memory_check      whether it fits devices, hosts and disks
predicted_bytes_by_tier, free_host_memory  the bytes on each of them; the free memory of this machine
oom_advice                       the message for a failed allocation, with the flags that take less
"""
