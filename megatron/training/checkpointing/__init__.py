"""Resuming from a checkpoint: which folder, whether its model and settings fit, and the lock on --save.

May import: core, `training.settings` and `training.runtime`. To let a setting change between runs: add a line to `compared`.
"""
