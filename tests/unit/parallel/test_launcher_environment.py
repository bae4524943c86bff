"""What the variables of a launcher mean, and which are refused. Written down from the launchers' manuals, and from what MPICH's
mpiexec (5.0) and Open MPI's prterun (5.0) give their processes."""

import pytest
from said import tells

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.launcher_environment import Launch, discover, first_node, threads_per_rank

TORCHRUN = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="node0", MASTER_PORT="1234")
OPEN_MPI = dict(
    OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2"
)
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "MASTER_PORT": "1234",
}
SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}

KNOWN = {
    "nobody": ({}, Launch()),
    "torchrun": (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 1234)),
    "by hand, the rank as local rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        Launch("torchrun", 1, 2, 1, 1, "a", 1),
    ),
    "by hand, one process without an address": ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", port=29500)),
    "Open MPI on one machine": (OPEN_MPI, Launch("Open MPI", 1, 2, 1, 2, "127.0.0.1", 29500)),
    "Open MPI on two": (
        OPEN_MPI
        | dict(OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="9"),
        Launch("Open MPI", 1, 2, 0, 1, "a", 9),
    ),
    "MPICH on one machine": (MPICH, Launch("PMI", 1, 2, 1, 2, "127.0.0.1", 29500)),
    "srun": (SRUN, Launch("SLURM", 6, 7, 0, 1, "gpu07", 1234)),
    "srun, another number of tasks than the job": (
        SRUN
        | {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "1",
        },
        Launch("SLURM", 1, 2, 1, 2, "127.0.0.1", 1234),
    ),
    "torchrun inside srun": (SRUN | TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 1234)),
    "mpirun inside a SLURM job": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | OPEN_MPI,
        Launch("Open MPI", 1, 2, 1, 2, "127.0.0.1", 1234),
    ),
    "srun --mpi=pmi2": (SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7"}, Launch("PMI", 6, 7, 0, 1, "gpu07", 1234)),
    "torchrun inside salloc": (SALLOC | TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 1234)),
    "a job of one task": ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch()),
    "one process by hand inside salloc": (SALLOC | {"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", port=29500)),
}

NOT_BY_SRUN = "SLURM 8|RANK=0 WORLD_SIZE=1"
REFUSED = {
    "rank alone": ({"RANK": "0"}, "RANK WORLD_SIZE|torchrun"),
    "world size alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE RANK"),
    "an empty rank": ({"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE RANK"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE MASTER_ADDR MASTER_PORT"),
    "rank too large": (TORCHRUN | {"RANK": "8"}, "RANK 8 WORLD_SIZE 0 7"),
    "no numbers": (TORCHRUN | {"RANK": "one", "MASTER_PORT": "http"}, "RANK one|MASTER_PORT http 1 65535"),
    "negative": (TORCHRUN | {"RANK": "-1"}, "RANK -1"),
    "no ranks": (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE 0 1"),
    "port too large": (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT 65536"),
    "salloc's shell": (SALLOC, NOT_BY_SRUN),
    "salloc's shell as a step": (SALLOC | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, NOT_BY_SRUN),
    "the batch script": (SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, NOT_BY_SRUN),
    "PMI alone": ({"PMI_RANK": "0"}, "PMI_RANK PMI_SIZE"),
    "mpirun on two machines": (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MPI 2|MASTER_ADDR|mpirun -x"),
}


@pytest.mark.parametrize("environment, expected", KNOWN.values(), ids=KNOWN)
def test_a_launcher_is_recognised(environment, expected):
    assert discover(environment) == expected


@pytest.mark.parametrize("environment, said", REFUSED.values(), ids=REFUSED)
def test_wrong_and_partial_variables_are_refused_in_words(environment, said):
    with pytest.raises(ConfigError) as refused:
        discover(environment)
    assert all(tells(refused.value, facts) for facts in said.split("|"))


def test_the_ranks_of_a_step_agree_on_a_port_and_other_jobs_have_another():
    without = {name: value for name, value in SRUN.items() if name != "MASTER_PORT"}
    ports = {discover(without | {"SLURM_PROCID": str(rank)}).port for rank in range(7)}
    ports.add(discover(without | {"SLURM_JOB_ID": "78"}).port)
    ports.add(discover(without | {"SLURM_STEP_ID": "1"}).port)
    assert len(ports) == 3 and all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[007,9],m", "n007"),
        ("n[1-2].site,x", "n1.site"),
        ("a,n[1-2]", "a"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


ENVIRONMENTS_AND_THREADS = [
    ({}, 4, 16, False, 4),
    ({}, 3, 16, False, 5),
    ({}, 8, 4, False, 1),
    ({}, 1, 16, False, None),
    ({}, 4, 4, True, None),
    ({"OMP_NUM_THREADS": "2"}, 4, 16, False, None),
]


@pytest.mark.parametrize("environment, local_size, cores, bound, threads", ENVIRONMENTS_AND_THREADS)
def test_ranks_divide_the_cores_that_they_share(environment, local_size, cores, bound, threads):
    assert threads_per_rank(environment, Launch(local_size=local_size), cores, bound=bound) == threads
