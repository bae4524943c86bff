"""The scripts of examples/, at a tiny size, as their users start them. Processes, because bash and the launchers are what is tested.

docs/adding_a_model.md, README.md and tests/unit/project/test_docs.py say of commands that they are run here.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, free_port, log_lines, run
from said import tells

EXAMPLES = ROOT / "examples"
LAUNCH = f"{sys.executable} -m torch.distributed.launch"
TINY = {"NUM_LAYERS": "2", "HIDDEN_SIZE": "32", "SEQ_LENGTH": "16", "MICRO_BATCH_SIZE": "1", "TRAIN_ITERS": "2"}
QUIET = ["--eval-iters", "0", "--log-interval", "1"]


def bash(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """A script with the tests' own Python, made-up data and a tiny model; checkpoints go to `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "WORLD_SIZE"))}
    environment |= {"VENV": sys.prefix, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DEVICE": "cpu", **TINY}
    environment |= {"CHECKPOINT_PATH": str(folder), "MASTER_PORT": str(free_port()), **variables}
    return subprocess.run(["bash", *command], env=environment, capture_output=True, text=True, timeout=120, check=False)


def assert_trained(done: subprocess.CompletedProcess, folder: Path, said: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.iteration for line in log_lines(done.stdout)] == [1, 2], done.stdout + done.stderr
    assert said in done.stdout
    assert (folder / "iter_0000002" / "manifest.json").is_file()


SCRIPTS = {
    "pretrain_gpt.sh": ({}, "1 rank(s) on cpu"),
    "pretrain_gpt_distributed.sh": ({"GPUS_PER_NODE": "2"}, "2 rank(s) on cpu: tp 1, pp 1, dp 2"),
    "pretrain_gpt_distributed_with_mp.sh": ({"GPUS_PER_NODE": "4"}, "4 rank(s) on cpu: tp 2, pp 2, dp 1"),
    "pretrain_bert.sh": ({}, "1 rank(s) on cpu"),
    "pretrain_bert_distributed.sh": ({"GPUS_PER_NODE": "2"}, "2 rank(s) on cpu: tp 1, pp 1, dp 2"),
    "pretrain_bert_distributed_with_mp.sh": ({"GPUS_PER_NODE": "4"}, "4 rank(s) on cpu: tp 2, pp 2, dp 1"),
    "pretrain_llama.sh": ({"GPUS_PER_NODE": "2"}, "2 rank(s) on cpu: tp 2, pp 1, dp 1"),
}


# Over processes, which the tests of training start in the same way.
COSTLY = (
    "pretrain_bert_distributed.sh",
    "pretrain_bert_distributed_with_mp.sh",
    "pretrain_gpt_distributed.sh",
    "pretrain_gpt_distributed_with_mp.sh",
    "pretrain_llama.sh",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in COSTLY)) for n in SCRIPTS])
def test_script_trains(name, tmp_path):
    variables, said = SCRIPTS[name]
    assert_trained(bash([str(EXAMPLES / name), *QUIET], tmp_path, **variables), tmp_path, said)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("pretrain_gpt.sh", "pretrain_bert.sh")])
def test_script_trains_under_the_older_launcher(name, tmp_path):
    """It hands each process its number as a flag."""
    variables, said = SCRIPTS[name]
    done = bash([str(EXAMPLES / name), *QUIET], tmp_path, LAUNCHER=LAUNCH, **variables)
    assert_trained(done, tmp_path, said)


@pytest.mark.full
@pytest.mark.parametrize("launcher", [None, LAUNCH], ids=["torchrun", "torch.distributed.launch"])
def test_script_trains_on_two_nodes_started_apart(launcher, tmp_path):
    """The same command on each, with its own number; the two meet over this machine's loopback."""
    variables = dict(
        NNODES="2", GPUS_PER_NODE="1", TENSOR_MP_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    variables |= {"LAUNCHER": launcher} if launcher else {}
    command = [str(EXAMPLES / "pretrain_gpt_distributed_with_mp.sh"), *QUIET]
    with ThreadPoolExecutor() as nodes:
        started = [nodes.submit(bash, command, tmp_path, NODE_RANK=str(node), **variables) for node in range(2)]
        first, second = (one.result() for one in started)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 rank(s) on cpu: tp 1, pp 2, dp 1" in first.stdout
    assert_trained(second, tmp_path, "iteration")  # the last rank's lines


def test_a_missing_environment_is_said(tmp_path):
    done = bash([str(EXAMPLES / "pretrain_llama.sh")], tmp_path, VENV="/nowhere")
    assert done.returncode == 1
    assert tells(done.stderr, "pretrain_llama /nowhere/bin/python examples/setup_env.sh")


HEADED = ["examples/setup_env.sh", "examples/quickstart.sh", "tests/run.sh", "tests/wheel.sh", "tests/real.sh"]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--fast", "--help"]], ids=" ".join)
@pytest.mark.parametrize("script", HEADED)
def test_help_is_shown_before_anything_is_made(script, words, tmp_path):
    """No folder, no environment, no Python, and nothing of the PATH but the shell's own tools."""
    environment = {
        "VENV": str(tmp_path / "venv"),
        "PYTHON": "/nowhere/python",
        "PATH": "/usr/bin:/bin",
        "TMPDIR": str(tmp_path),
    }
    environment |= {"REAL_ARTEFACTS": str(tmp_path / "real")}
    done = subprocess.run(
        ["bash", str(ROOT / script), *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
    comment = []
    for line in (ROOT / script).read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").removeprefix(" "))
    assert done.stdout.splitlines() == comment


@pytest.mark.parametrize("script", ["setup_env", "quickstart"])
def test_a_script_without_arguments_refuses_them_before_anything_is_made(script, tmp_path):
    done = bash([str(EXAMPLES / f"{script}.sh"), "--train-iters", "9"], tmp_path, VENV=str(tmp_path / "venv"))
    assert done.returncode != 0
    assert tells(done.stderr, f"{script} --train-iters 9")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- clusters

SRUN = """#!/usr/bin/env bash
# Stands for Slurm: runs the command once for each of two nodes, and hands on what ends it.
shift  # --kill-on-bad-exit=1
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
trap 'kill -TERM $first $second' TERM
wait $first && wait $second
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >>"$CALLS"
[ "$1" != show ] || printf 'localhost\\notherhost\\n'
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The variables of a job on two nodes, and doubles of Slurm's commands."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "TENSOR_MP_SIZE": "1",
    }


SBATCH = str(EXAMPLES / "slurm" / "pretrain_gpt.sbatch")


@pytest.mark.full
def test_sbatch_trains_on_two_nodes(slurm, tmp_path):
    done = bash([SBATCH, *QUIET], tmp_path / "saved", **slurm)
    assert_trained(done, tmp_path / "saved", "2 rank(s) on cpu: tp 1, pp 2, dp 1")
    assert Path(slurm["CALLS"]).read_text() == "show hostnames node[1-2]\nshow job 17\n"


def test_sbatch_queues_the_job_again_before_the_limit(slurm, tmp_path):
    """The step is a double that never ends by itself; the signal comes from the double, as Slurm would send it."""
    srun = Path(slurm["PATH"].split(":")[0]) / "srun"
    srun.write_text("#!/usr/bin/env bash\ntrap 'exit 143' TERM\nkill -USR1 $PPID\nwhile :; do sleep 0.05; done\n")
    done = bash([SBATCH], tmp_path / "saved", **slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the time limit is near" in done.stdout
    assert Path(slurm["CALLS"]).read_text().splitlines()[-1] == "requeue 17"


def test_sbatch_asks_slurm_for_a_signal_and_a_requeue():
    asked = re.findall(r"^#SBATCH (.*)$", Path(SBATCH).read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append", "--ntasks-per-node=1"} <= set(asked)


@pytest.mark.full
@pytest.mark.parametrize("launcher", [{}, {"LAUNCHER": LAUNCH}], ids=["torchrun", "torch.distributed.launch"])
def test_sbatch_runs_with_bash_alone(launcher, tmp_path):
    done = bash([SBATCH, *QUIET], tmp_path, GPUS_PER_NODE="2", TENSOR_MP_SIZE="1", **launcher)
    assert_trained(done, tmp_path, "2 rank(s) on cpu: tp 1, pp 2, dp 1")


def kubernetes() -> tuple[dict, dict]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "pretrain_gpt.yaml").read_text())
    return service, job


def test_kubernetes_job_agrees_with_itself():
    service, job = kubernetes()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == variables["NNODES"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == variables["GPUS_PER_NODE"]
    names = service["metadata"]["name"], service["spec"]["selector"]["job-name"], pod["subdomain"]
    assert set(names) == {job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.full
@pytest.mark.parametrize("launcher", [{}, {"LAUNCHER": LAUNCH}], ids=["torchrun", "torch.distributed.launch"])
def test_kubernetes_command_trains(launcher, tmp_path):
    """What the pod of index 0 runs, as the only one, with a tiny model."""
    container = kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]
    bash_word, *command = container["command"]
    assert bash_word == "bash" and command[0] == "-c"
    script = command[1].replace("examples/", f"{EXAMPLES}/")
    tiny = {"NNODES": "1", "GPUS_PER_NODE": "2", "TENSOR_MP_SIZE": "1", "JOB_COMPLETION_INDEX": "0", **launcher}
    done = bash(["-c", script, *command[2:], *QUIET], tmp_path, **tiny)
    assert_trained(done, tmp_path, "2 rank(s) on cpu: tp 1, pp 2, dp 1")


# ---------------------------------------------------------------- a fork

TP = "--tensor-model-parallel-size 2"
FORK = (
    "--branch-scale 0.7 --phrase-length 4 --vocab-size 50 --seq-length 16 "
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 "
    "--lr 1e-2 --eval-iters 0 --log-interval 1 --device cpu"
)


@pytest.mark.full
def test_a_fork_elsewhere_trains_alike_in_one_process_and_over_four(tmp_path, monkeypatch):
    """Its own layer, auxiliary loss, schedule, data and flags, from a copied folder, over this code as it is."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copytree(EXAMPLES / "minimal_fork", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    script = str(tmp_path / "mine" / "pretrain.py")
    four = f"--pipeline-model-parallel-size 2 --pipeline-schedule rounds {TP} --sequence-parallel --save {tmp_path}/saved".split()
    one, many = (run([script, *FORK.split(), *more], ranks).succeeded() for more, ranks in (([], 1), (four, 4)))
    assert [line.iteration for line in one.training] == [1, 2, 3, 4, 5, 6]
    assert "memory of a rank, predicted:" in one.stdout[0]
    assert one.training[-1].loss < one.training[0].loss
    own = [float(found[1]) for line in one.training if (found := re.search(r"restart loss: (\S+)", line.text))]
    assert len(own) == 6 and own[-1] < 0.9 * own[0]  # dropout: one step's may be above the last's
    for a, b in zip(many.training, one.training, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    assert re.search(
        r"  Side by side\n    branch_scale +0.7  \(default 1.0\)\n    restart_weight +0.1\n  Phrases\n", one.stdout[0]
    )
    state = json.loads((tmp_path / "saved" / "iter_0000006" / "manifest.json").read_text())["state"]
    assert (state["model"], state["vocab_size"]) == ("SideBySideModel of SideBySideLayer", 50)
    assert state["config"]["own_model"] == {"branch_scale": 0.7}
    assert state["config"]["own"] == {"restart_weight": 0.1, "phrase_length": 4}
    other = f"--phrase-length 5 --restart-weight 0 --branch-scale 0.5 --load {tmp_path}/saved".split()
    outcome = run([script, *FORK.split(), *other])
    assert outcome.codes == (2,) and tells(outcome.stderr[0], "branch_scale 0.7 0.5")


def test_a_fork_hears_of_mistakes_in_its_own_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outcome = run([str(EXAMPLES / "minimal_fork" / "pretrain.py"), *FORK.split(), "--branch-scale", "2"])
    assert outcome.codes == (2,) and tells(outcome.stderr[0], "--branch-scale 2.0 0 1")
