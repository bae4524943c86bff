"""How much memory a run takes: predicted before it starts, and counted while it runs.

    shapes      torch's tensors without values, and other ranks that communicate nothing
    dry_run     a step of one rank, by the script's own code: what each action of the pipeline adds, and its peak
    timeline    the same along the schedule of every pipeline rank: the prediction; `report` prints it
    tracker     the live bytes by kind, as tensors come and go; `watch` prints them beside the prediction
    offload     whether state fits disks and machines, else the run is refused; `tier_bytes` counts it
    room        whether the prediction fits, and which flags make it less; `shortage` says the same of a failed allocation

May import: core, `training.settings`, and the building of a run (`runtime`, `chunks`, ...) for `dry_run`.
To add a layer, a model or a ZeRO stage: nothing here. It is predicted because it runs.
"""
