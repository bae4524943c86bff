"""Pipeline schedules as data: lists of actions, made by pure functions of integers. No torch.

actions          F, B, W and transfers; gpipe, 1F1B, interleaved, zero-bubble H1
zb_v             ZB-V
registry         SCHEDULES: --pipeline-schedule by name
lower            adds transfers and gradient reductions
simulate, plot   times, bubbles and drawings
"""
