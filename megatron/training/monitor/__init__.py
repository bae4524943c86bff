"""Observers of a run, which change nothing in it: log, sinks, timers, profiles, statistics, heartbeats.

May import: core, `training.runtime` and the settings. To send a run's numbers elsewhere: add a class to `sinks`.
"""
