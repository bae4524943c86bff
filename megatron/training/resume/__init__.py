"""How a run goes on from a checkpoint: which folder, whether its model and settings fit, and who may write to --save.

May import: core and `training.settings`. To add a setting that may change between runs: a line in `compared`.
"""
