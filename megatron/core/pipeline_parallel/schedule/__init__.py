"""Pipeline schedules as data: lists of actions, made by pure functions of integers. No torch.

actions             F, B, W and transfers; which actions an action needs; the stages of each rank
gpipe_1f1b_zb_h1    gpipe, 1F1B, interleaved, zero-bubble H1; the forwards of an evaluation
zb_v                ZB-V
registry            SCHEDULES: --pipeline-schedule by name
lower               adds transfers and gradient reductions
simulate, plot      times, bubbles and drawings
"""
