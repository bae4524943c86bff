"""Resuming from a checkpoint: which folder, whether its model and settings fit, and the lock on --save.

May import: core and `training.settings`. To let a setting change between runs: add a line to `compared`.
"""
