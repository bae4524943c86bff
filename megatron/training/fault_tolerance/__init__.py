"""The end of a run: at its last step, on request (signal, duration, iteration), at Ctrl-C, or with an error.

May import: core, `training.settings`, and the errors that it reports. To add a reason to stop: add it to `exits`.
"""
