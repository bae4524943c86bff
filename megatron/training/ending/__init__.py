"""The end of a run: at its last step, on request (signal, duration, iteration), at Ctrl-C, or with an error.

May import: core and `training.settings`. To add a reason to stop: add it to `exits`.
"""
