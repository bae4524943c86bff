"""Megatron's collection of process groups, which its constructors take as `pg_collection`, or `model_comm_pgs` earlier.

    groups = ProcessGroupCollection.use_mpu_process_groups()       those of this job
    layer = TransformerLayer(config, submodules, pg_collection=groups)

Layers here have their groups from the mesh. A collection is accepted if it has the mesh's ranks, and then changes nothing;
another one is refused. Megatron's file: megatron/core/process_groups_config.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import CheckedArgument
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.initialize_model_parallel import ranks_of_group, torch_group

# Field of the collection -> axis of the mesh. The others have no axis here.
_AXES = {
    "tp": "tp",
    "pp": "pp",
    "mp": "mp",
    "embd": "embd",
    "pos_embd": "pos_embd",
    "cp": "cp",
    "tp_cp": "tp_cp",
    "ep": "ep",
    "expt_tp": "etp",
    "tp_ep": "ep_etp",
    "tp_ep_pp": "emp",
    "dp": "dp",
    "dp_cp": "dp_cp",
    "expt_dp": "edp",
    "intra_dp_cp": "dp_inner_cp",
    "intra_expt_dp": "edp_inner",
}
_AXES_OF_HCP = ("cp_heads", "cp_ring")  # "hcp" is a list of two groups


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Groups of torch.distributed by name. A field that was not given is no attribute, as in Megatron."""

    tp: Any = field(init=False)
    pp: Any = field(init=False)
    mp: Any = field(init=False)
    embd: Any = field(init=False)
    pos_embd: Any = field(init=False)
    cp: Any = field(init=False)
    tp_cp: Any = field(init=False)
    hcp: Any = field(init=False)
    ep: Any = field(init=False)
    expt_tp: Any = field(init=False)
    tp_ep: Any = field(init=False)
    tp_ep_pp: Any = field(init=False)
    tp_dp_cp: Any = field(init=False)
    dp: Any = field(init=False)
    dp_cp: Any = field(init=False)
    expt_dp: Any = field(init=False)
    intra_dp_cp: Any = field(init=False)
    intra_expt_dp: Any = field(init=False)
    inter_dist_opt: Any = field(init=False)
    intra_dist_opt: Any = field(init=False)

    def __init__(self, **groups: Any):
        names = [each.name for each in fields(self)]
        for name, group in groups.items():
            if name not in names:
                raise ValueError(f"ProcessGroupCollection has no group {name!r}; its groups are {', '.join(names)}")
            setattr(self, name, group)

    def __repr__(self) -> str:
        return f"ProcessGroupCollection({', '.join(vars(self))})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> "ProcessGroupCollection":
        """Return the groups of this job. Every rank must call on first use: it may make a group of one rank.

        required_pgs: their names; default: all that there are. Raises NotImplementedError for a name without a group.
        """
        served = [*_AXES, "hcp"]
        required = served if required_pgs is None else list(required_pgs)
        missing = [name for name in required if name not in served]
        if missing:
            raise NotImplementedError(
                f"ProcessGroupCollection: no groups {missing} here; there are {', '.join(served)}"
            )
        groups: dict[str, Any] = {}
        for name in required:
            if name == "hcp":
                groups[name] = [torch_group(axis) for axis in _AXES_OF_HCP]
            else:
                groups[name] = torch_group(_AXES[name])
        return cls(**groups)


ModelCommProcessGroups = ProcessGroupCollection  # Megatron's earlier names, when it was two
GradCommProcessGroups = ProcessGroupCollection


def check_groups(groups: Any, where: str) -> None:
    """Raise NotImplementedError for a collection of other groups than this job's. None, and groups of None, are accepted.

    where: the argument, for the message.
    """
    if groups is None:
        return
    known = [each.name for each in fields(ProcessGroupCollection)]
    if not any(hasattr(groups, name) for name in known) and not isinstance(groups, ProcessGroupCollection):
        raise NotImplementedError(f"{where} is {groups!r}; give a ProcessGroupCollection, or leave it out")
    for name in known:
        group = getattr(groups, name, None)
        if group is None:
            continue
        if name == "hcp":
            for number, (axis, part) in enumerate(zip(_AXES_OF_HCP, group, strict=False)):
                check_group(part, axis, f"{where}.hcp[{number}]")
        elif name in _AXES:
            check_group(group, _AXES[name], f"{where}.{name}")
        else:
            raise NotImplementedError(f"{where}.{name}: there is no such group here; leave it out")


def check_group(group: Any, axis_name: str, where: str) -> None:
    """Raise NotImplementedError unless a torch.distributed group has the ranks of an axis, in their order."""
    if group is None or group is torch_group(axis_name):
        return
    ranks = get_mesh()[axis_name].ranks
    given = ranks_of_group(group)
    if given != ranks:
        raise NotImplementedError(
            f"{where} has the ranks {given}, and this job's group {ranks}; give a group of parallel_state, or leave it out"
        )


# Arguments of Megatron's for `accepts_defaults_only`.
OWN_GROUPS = CheckedArgument(check_groups)
OWN_GROUPS_BY_NAME = CheckedArgument(check_groups, by_name=True)
OWN_TP_GROUP = CheckedArgument(lambda group, where: check_group(group, "tp", where))
OWN_CP_GROUP = CheckedArgument(lambda group, where: check_group(group, "cp", where))

__getattr__ = names_of_megatron(__name__)
