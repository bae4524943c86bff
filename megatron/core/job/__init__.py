"""The processes of a job.

    launch.py      what the launcher says of this process: rank, world size, where to meet (no torch)
    processes.py   how the processes meet, and leave
    lines.py       who has not come, and who has died (sockets, no torch)

Only `parallel_state`, `model_parallel` and training import it. A new launcher is a line of the table in `launch.py`.
"""
