"""Guards against wrong numbers: what a run looks at beside its loss, and what it does when something is wrong.

    guard_config       the flags (no torch)
    guard              `Guard`: the table of checks, called by the loop at a few places of a step
    check, replicas    the base class of a check; copies of the weights compared over ranks
    state_hashes       bits of weights, masters and moments that change at rest

docs/reliability.md says what each check sees, and what none sees.
May import: core, `training.settings`, `training.runtime`.
To add a check: a class in a file of its own, and a line of CHECKS.
"""
