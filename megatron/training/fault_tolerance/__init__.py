"""A run ends in order: at its last step, on request, at Ctrl-C, with an error, or because a rank hangs or died.

exit_conditions                                 requests to stop: a signal, duration, iteration
failure_shutdown, exit_immediately_on_ctrl_c    an error ends all ranks in order, with one message; Ctrl-C with one line
hang_watch, find_hung_rank                      a rank that hangs is found, named and ended
exit_with_launcher                              a rank ends when its launcher has ended
process_stat, hang_watch_folder                 the state of processes from /proc; the shared folder of a running job

To add a reason to stop: `exit_conditions`.
"""
