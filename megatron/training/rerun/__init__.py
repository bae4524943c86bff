"""Guards against wrong numbers: what a run looks at beside its loss, and what it does when something is wrong.

    guard_config       the flags (no torch)
    guard, check       `Guard`: the table of checks, called by the loop at a few places; the base class of a check
    replicas           copies of the weights, compared over ranks
    state_hashes       bits of weights, masters and moments that change at rest
    judge              numbers that are not finite or far too large: stop, skip or report; with large_values
    replay             a microbatch computed twice, bit by bit
    dump               a bad step on disk, for tools/replay_step.py
    first_bad          names the first tensor of a step that is not finite; with kept_batches, to compute a step again

docs/reliability.md says what each check sees, and what none sees.
May import: core, `training.settings`, `training.runtime`.
To add a check: a class in a file of its own, and a line of CHECKS.
"""
