"""What looks at a run and changes nothing in it: the log, sinks, timers, profiles, statistics, heartbeats.

May import: core and `training.settings`. To send a run's numbers to another place: a class in `sinks`.
"""
