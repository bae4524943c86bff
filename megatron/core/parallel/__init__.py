"""The processes of a job.

    launcher_environment.py      rank, world size and meeting place, as the launcher gives them (no torch)
    processes.py   how the processes meet, and leave
    liveness.py       which rank is missing, and which has died (sockets, no torch)

May import: `comm`, `config`, `errors`, `grid`, `current_mesh`. Only `parallel_state`, `model_parallel` and training import it.
To add a launcher: a line of the table in `launcher_environment.py`.
"""
