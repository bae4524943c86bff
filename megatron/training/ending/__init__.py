"""How a run ends: at its last step, on a request (signal, duration, iteration), at Ctrl-C, or with an error.

May import: core and `training.settings`. To add a reason to stop: a line in `exits`.
"""
