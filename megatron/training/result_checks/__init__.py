"""Wrong numbers are detected, and the run stops, skips the step or reports them.

check_runner, base_check                  the table of checks, called by the loop; the base class of one
skip_or_stop_bad_step                     numbers that are not finite or far too large
                                          (`ten_times_largest_loss_rule`): stop, skip or
                                          report
rerun_first_microbatch_every_interval     a microbatch is computed twice: does the device give the same bits?
weight_hash_across_replicas,              copies that differ between ranks; bits that change at rest
hash_state_between_updates
step_dump                                 a bad step on disk, for tools/replay_step.py
nan_locator                               the first tensor of a step that is not finite

docs/reliability.md says what each check sees. To add a check: a class in a file of its own, and a line of CHECKS.
"""
