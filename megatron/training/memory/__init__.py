"""How much memory a run takes: predicted before it starts, and counted while it runs.

    shapes      torch's tensors without values, and other ranks that say nothing
    dry_run     a step of one rank, by the script's own code: what each action of the pipeline adds, and has at its peak
    timeline    the same along the schedule of every pipeline rank: the prediction; `report` prints it
    tracker     the bytes that live, by kind, as tensors come and go; `watch` prints them beside the prediction
    offload     whether state fits disks and machines, else the run is refused; `tier_bytes` counts it
    room        whether the prediction fits, and which flags make it less; `shortage` says the same of a failed allocation

Nothing here knows a layer, a model or a stage of ZeRO: a new one is predicted because it runs.
"""
