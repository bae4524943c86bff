"""How much memory a run takes, on paper before it starts and as counted while it runs.

    sizes           the integers that it follows from
    parameters      what lies in the buffers of a stage: the real plan of `core/distributed/plan.py`, of tensors that are not there
    activations     what a microbatch keeps for its backward, and what the backward needs beside; its operations are in `steps`
    elsewhere       what of it waits in a tier, or in slots
    communication   units of ZeRO that come and go, sums under way, transfers between stages
    estimate        all of it, for each pipeline stage; `report` prints it
    room            whether it fits, and which flags make it less
    of_run          the sizes of a run that has begun
    tracker         the bytes that a run really has, by the same kinds; `watch` prints them beside the prediction

All but the last two lines are pure integers.
"""
