"""How much memory a run takes: predicted before it starts, and counted while it runs.

shapes_only            torch's tensors without values, and other ranks that communicate nothing
dry_run                a step of one rank, by the script's own code: what each action adds, and its peak
peak_along_schedule    the same along the schedule of every pipeline rank: the prediction; `report` prints it
memory_tracker         live bytes by kind, as tensors come and go; `memory_monitor` prints them beside the prediction
memory_advice, memory_check, bytes_by_tier, host_memory    does it fit devices, hosts and disks?
oom_advice             a failed allocation, with the flags that take less
"""
