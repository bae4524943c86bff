"""The place of this process in its job (rank, world size, address) is read from the launcher's environment variables.

    started by                         rank, world size                       local rank, ranks of the node
    torchrun, torch.distributed.launch RANK, WORLD_SIZE                       LOCAL_RANK, LOCAL_WORLD_SIZE
    mpirun of Open MPI                 OMPI_COMM_WORLD_RANK, .._SIZE          OMPI_COMM_WORLD_LOCAL_RANK, .._SIZE
    mpiexec of MPICH, Intel MPI, Cray  PMI_RANK, PMI_SIZE                     MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun of SLURM                      SLURM_PROCID, SLURM_STEP_NUM_TASKS     SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE

torchrun's variables may also be set by hand. The first launcher whose variables are set counts. SLURM is last because
mpirun inside a SLURM job starts one daemon per node by srun, and its processes inherit the daemon's SLURM_PROCID. The
rendezvous address is MASTER_ADDR and MASTER_PORT; default: this machine if all ranks are on it, else the first node of
the SLURM step, and a port derived from the job's number. Pure functions.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError


@dataclass(frozen=True)
class Launch:
    """The place of one process in its job; by default a job of one process."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this node; the global rank if the launcher does not give it
    local_size: int = 1  # ranks on this node
    address: str | None = None  # where rank 0 listens; None for a job of one process without rendezvous
    port: int | None = None


class _Variables(NamedTuple):
    """The names of a launcher's variables, and of the program that sets them."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    program: str

    def remedy(self, variable: str) -> str:
        """Return what to do if only `variable` is set."""
        if self.launcher == "SLURM":
            return f"start with {self.program}"
        return f"start with {self.program}, or unset {variable}"


_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun"),
    _Variables("Open MPI", *(_MPI + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "mpirun"),
    _Variables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpiexec"),
)
DEFAULT_PORT = 29500  # torchrun's


def discover(environment: Mapping[str, str]) -> Launch:
    """Return the place of this process in its job. Raises ConfigError with all invalid and missing variables."""
    for names in _LAUNCHERS:
        if environment.get(names.rank) or environment.get(names.size):
            return _read(environment, names)
    if "SLURM_PROCID" in environment and _step(environment):
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        return _read(environment, _Variables("SLURM", "SLURM_PROCID", size, "SLURM_LOCALID", "", "srun"))
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_JOB_ID" in environment:
        raise ConfigError(
            f"this is a SLURM job of {tasks} tasks (SLURM_NTASKS), but this process was not started by srun, so it "
            "would train alone; start with srun or torchrun, or set RANK=0 WORLD_SIZE=1 for one process"
        )
    return Launch()


def _step(environment: Mapping[str, str]) -> str | None:
    """Return the number of this process's srun step; None in the batch script and in salloc's shell.

    Their step numbers are the largest of 32 bits.
    """
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step if step.isdigit() and int(step) < 0xFFFFFFF0 else None


class _Problems:
    """Reads integers from variables, and collects problems."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment
        self.problems: list[str] = []

    def number(self, name: str, default: int, low: int = 0, high: int | None = None) -> int:
        """Return the number in a variable, which must be from `low` to `high`; the default if it is not set."""
        text = self.environment.get(name, "")
        if not text:
            return default
        is_number = re.fullmatch(r"\d+", text.strip()) is not None
        if not is_number or int(text) < low or (high is not None and int(text) > high):
            limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
            self.problems.append(f"{name} is {text!r}; it must be a whole number {limits}")
            return default
        return int(text)


def _read(environment: Mapping[str, str], names: _Variables) -> Launch:
    read = _Problems(environment)
    for name, missing in ((names.rank, names.size), (names.size, names.rank)):
        if environment.get(missing, "") == "":
            raise ConfigError(f"{name} is set but {missing} is not; {names.remedy(name)}")
    world_size = read.number(names.size, 1, low=1)
    rank = read.number(names.rank, 0)
    local_size = _slurm_local_size(environment) if names.launcher == "SLURM" else read.number(names.local_size, 0)
    # MPICH under SLURM (srun --mpi=pmi2) sets no local variables; srun's apply.
    local_name = names.local_rank
    if local_name not in environment and "SLURM_LOCALID" in environment:
        local_name = "SLURM_LOCALID"
    local_rank = read.number(local_name, rank)
    if not read.problems and rank >= world_size:
        read.problems.append(
            f"{names.rank} is {rank}, but {names.size} is {world_size}; ranks are 0 to {world_size - 1}"
        )
    port = read.number("MASTER_PORT", 0, low=1, high=65535) or _port_of_job(environment, names.launcher)
    address = _address(read, names, world_size, local_size)
    if read.problems:
        raise ConfigError(read.problems)
    return Launch(names.launcher, rank, world_size, local_rank, max(local_size, 1), address, port)


def _address(read: _Problems, names: _Variables, world_size: int, local_size: int) -> str | None:
    """Return the rendezvous address; None for a job without rendezvous, and with a problem in `read`."""
    environment = read.environment
    if names.launcher == "torchrun":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if not missing:
            return environment["MASTER_ADDR"]
        if world_size > 1:
            verb = "are" if len(missing) > 1 else "is"
            read.problems.append(
                f"{names.size} is set but {' and '.join(missing)} {verb} not; {names.remedy(names.size)}"
            )
        return None
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if local_size == world_size:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    read.problems.append(
        f"{names.launcher} started {world_size} processes on several machines; set MASTER_ADDR on all of them to the name of "
        "the first machine (mpirun -x MASTER_ADDR=..., mpiexec -genv MASTER_ADDR ...)"
    )
    return None


def _port_of_job(environment: Mapping[str, str], launcher: str) -> int:
    """Return a port that is equal on all ranks of a job, and most likely differs between jobs on a node."""
    number = environment.get("SLURM_JOB_ID") or environment.get("PMIX_NAMESPACE")
    if launcher == "torchrun" or number is None:
        return DEFAULT_PORT
    return 20000 + zlib.crc32(f"{number} {_step(environment)}".encode()) % 10000


def first_node(nodes: str) -> str:
    """Return the first name of a SLURM node list: "gpu[007-012,20],login" -> "gpu007"."""
    first = re.match(r"([^[,]*)(?:\[(\d*)[^]]*\]?([^,]*))?", nodes)
    return "".join(first.groups(default=""))


def _slurm_local_size(environment: Mapping[str, str]) -> int:
    """Return the ranks on this node; 0 if unknown.

    "2(x3),1" means 2 on each of the first three nodes, and 1 on the fourth.
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    sizes: list[int] = []
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        sizes += [int(size)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0")
    return sizes[int(node)] if node.isdigit() and int(node) < len(sizes) else 0


def threads_per_rank(environment: Mapping[str, str], launch: Launch, cores: int, *, bound: bool = False) -> int | None:
    """Return the threads per rank if the ranks of a node share its `cores`; None: leave it to torch.

    OMP_NUM_THREADS takes precedence (torchrun sets it to 1 if it is unset). `bound`: the launcher has bound each rank
    to its own cores.
    """
    if environment.get("OMP_NUM_THREADS") or launch.local_size == 1 or bound:
        return None
    return max(1, cores // launch.local_size)
