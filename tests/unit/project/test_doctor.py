"""`python -m megatron.doctor` on a small fork: what is there, what is there with other arguments, what is missing, what to change."""

import ast
import inspect
import json
import textwrap
from pathlib import Path

import pytest

from megatron import doctor
from megatron.porting.flags_in_launch_scripts import flags_of_shell, flags_of_yaml
from megatron.porting.judge_fork_names_and_flags import attributes_of_args
from megatron.porting.names_used_by_fork import names_of_file
from megatron.training.initialize import derived_settings

SCRIPT = """
import torch
from megatron import get_args, mpu
from megatron.core import parallel_state as ps, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel as Model
from megatron.data.own_data import build
from helper import flags
try:
    from megatron.core.of_another_day import thing
except ImportError:
    thing = None

def provider(pre_process=True, mpu_size=1):
    args = get_args()
    print(args.hidden_size, args.own_flag, args.of_the_fork, args.padded_vocab_size, getattr(args, "maybe", 0))
    ps.get_data_parallel_group(with_context_parallel=True)
    ps.get_data_parallel_group(with_moon=True)
    ps.get_moon_group()
    tensor_parallel.vocab_parallel_cross_entropy(1)
    ModelType.encoder_or_decoder, ModelType.moon
    build(1)
    return Model(config=None, transformer_layer_spec=None, vocab_size=8, max_sequence_length=8, moon=True)

def shadowed(ps):
    return ps.nothing_of_ours
"""
HELPER = "def flags(parser):\n    parser.add_argument('--own-flag', type=int)\n    import megatron.core.utils\n    return parser\n"
LAUNCH = r"""#!/bin/bash
TP=2  # --not-a-flag
MODEL="
    --num-layers 2 --hidden-size 8 \
    --position-embedding-type alibi"
DATA=(
    --data-path $1
    --of-the-fork
    --num-layer 4
)
if [ $TP -gt 1 ]; then MORE="--sequence-parallel"; else MORE="--num-experts 1"; fi
CMD="torchrun --nproc_per_node 2 pretrain_gpt.py $MODEL ${DATA[@]} --own-flag=3 ${MORE} --tensor-model-parallel-size $TP"
$CMD 2>&1 | tee --append log
python tools/preprocess_data.py --input x --workers 4
"""
OWN_ARGUMENTS = "def add(parser):\n    parser.add_argument('--of-the-fork', action='store_true')\n"


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    files = {"pretrain_gpt.py": SCRIPT, "helper.py": HELPER, "run.sh": LAUNCH, "broken.py": "def ("}
    files |= {
        "megatron/arguments.py": OWN_ARGUMENTS,
        "megatron/data/own_data.py": "def build(): ...",
        "c.yaml": "MODEL_ARGS:\n  --moe-grouped-gemm: true",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def states(entries: list[dict]) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in entries}


def test_the_names_and_flags_of_a_fork_are_told_apart(fork: Path):
    found = doctor.examine(fork)
    assert (found["python_files"], found["launch_files"], found["left_out"]) == (3, 2, 2)
    assert [line.split(":")[0] for line in found["unreadable"]] == ["broken.py"]
    assert states(found["names"]) == {
        "get_args().hidden_size": "there",
        "get_args().of_the_fork": "missing",
        "get_args().own_flag": "there",
        "get_args().padded_vocab_size": "there",
        "megatron.core.enums.ModelType": "there",
        "megatron.core.enums.ModelType.encoder_or_decoder": "there",
        "megatron.core.enums.ModelType.moon": "missing",
        "megatron.core.models.gpt.GPTModel": "other",
        "megatron.core.of_another_day.thing": "missing",
        "megatron.core.parallel_state": "there",
        "megatron.core.parallel_state.get_data_parallel_group": "other",
        "megatron.core.parallel_state.get_moon_group": "missing",
        "megatron.core.tensor_parallel": "there",
        "megatron.core.tensor_parallel.vocab_parallel_cross_entropy": "other",
        "megatron.core.utils": "there",
        "megatron.data.own_data.build": "missing",
        "megatron.get_args": "there",
        "megatron.mpu": "there",
    }
    change = {entry["name"]: entry["change"] for entry in found["names"] + found["flags"]}
    assert "with_moon=" in change["megatron.core.parallel_state.get_data_parallel_group"]
    assert "needs target=" in change["megatron.core.tensor_parallel.vocab_parallel_cross_entropy"]
    assert "megatron/data/own_data.py" in change["megatron.data.own_data.build"]
    assert (
        "megatron/arguments.py" in change["get_args().of_the_fork"] and "extra_args_provider" in change["--of-the-fork"]
    )
    assert "the fork catches this" in change["megatron.core.of_another_day.thing"]
    assert states(found["flags"]) == {
        "--data-path": "there",
        "--hidden-size": "there",
        "--moe-grouped-gemm": "there",
        "--num-experts": "there",
        "--num-layer": "missing",
        "--num-layers": "there",
        "--of-the-fork": "missing",
        "--own-flag": "there",
        "--position-embedding-type": "other",
        "--sequence-parallel": "there",
        "--tensor-model-parallel-size": "there",
    }
    assert "--num-layers" in change["--num-layer"] and "'alibi' is not one of" in change["--position-embedding-type"]
    assert found["other_programs"] == {"preprocess_data.py": 1}


def test_what_a_file_assigns_to_the_arguments_is_there_for_the_others(tmp_path: Path):
    (tmp_path / "setup_of_tasks.py").write_text(
        "from megatron import get_args\ndef begin():\n    args = get_args()\n    args.own_size = args.micro_batch_size\n"
    )
    (tmp_path / "evaluate.py").write_text(
        "from megatron import get_args\ndef end():\n    args = get_args()\n    return args.own_size + args.other_size\n"
    )
    found = states(doctor.examine(tmp_path)["names"])
    assert found["get_args().own_size"] == "there" and found["get_args().other_size"] == "missing"


def test_a_name_that_is_not_built_is_missing_with_its_reason_however_it_is_used(tmp_path: Path):
    (tmp_path / "server.py").write_text(
        "from megatron.core.inference.engines import StaticInferenceEngine, NoEngine\n"
        "from megatron.core.transformer import cuda_graphs\n"
        "from megatron.core.jit import jit_fuser\n"
        "class Engine(StaticInferenceEngine): ...\n"
        "print(StaticInferenceEngine.generate, cuda_graphs.CudaGraphManager())\n"
    )
    entries = {entry["name"]: entry for entry in doctor.examine(tmp_path)["names"]}
    assert {name: entry["state"] for name, entry in entries.items()} == {
        "megatron.core.inference.engines.NoEngine": "missing",
        "megatron.core.inference.engines.StaticInferenceEngine": "missing",
        "megatron.core.jit.jit_fuser": "there",
        "megatron.core.transformer.cuda_graphs": "there",
        "megatron.core.transformer.cuda_graphs.CudaGraphManager": "missing",
    }
    assert "tools/generate.py" in entries["megatron.core.inference.engines.StaticInferenceEngine"]["change"]
    assert "CUDA graphs" in entries["megatron.core.transformer.cuda_graphs.CudaGraphManager"]["change"]


def test_the_reason_of_a_class_that_only_raises_is_found_whatever_it_takes(tmp_path: Path):
    (tmp_path / "generate.py").write_text("from megatron.core import InferenceParams\nInferenceParams(1, 8)\n")
    (entry,) = doctor.examine(tmp_path)["names"]
    assert entry["state"] == "missing" and "tools/generate.py" in entry["change"]


def test_the_doctor_knows_what_the_arguments_have_besides_flags():
    function = ast.parse(textwrap.dedent(inspect.getsource(derived_settings)))
    returned = next(node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    assert {key.value for key in returned.keys} <= attributes_of_args()


def test_the_page_the_json_and_the_exit_codes(fork: Path, capsys):
    assert doctor.main([str(fork)]) == 1
    said = capsys.readouterr().out
    assert "2 of its own package megatron are left out" in said and "Names missing:" in said
    assert "  megatron.core.parallel_state.get_moon_group   (pretrain_gpt.py:19)\n" in said
    assert doctor.main([str(fork / "helper.py"), "--json"]) == 0
    assert states(json.loads(capsys.readouterr().out)["names"]) == {"megatron.core.utils": "there"}
    assert doctor.main([str(fork / "pretrain_gpt.py"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["python_files"] == 2  # with the module beside it
    assert doctor.main([str(fork / "nothing")]) == 2 and "there is no" in capsys.readouterr().err


def test_uses_are_read_with_their_places_and_calls(fork: Path):
    uses = names_of_file(fork / "pretrain_gpt.py", fork).uses
    (call,) = [use for use in uses if use.name.endswith("GPTModel") and not use.module]
    assert call.keywords == ("config", "transformer_layer_spec", "vocab_size", "max_sequence_length", "moon")
    assert dict(call.constants)["moon"] is True and call.where.startswith("pretrain_gpt.py:")
    assert not [use for use in uses if "nothing_of_ours" in use.name]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("python pretrain_gpt.py --a 1 --b=2 # --c", {"--a": ("1",), "--b": ("2",)}),
        ("X='--a 1'\nX+=' --b'\npython pretrain_gpt.py $X", {"--a": ("1",), "--b": ()}),
        ("X='--a'\nX=\"$X --b ${Y:-3}\"\npython pretrain_gpt.py $X", {"--a": (), "--b": ("3",)}),
        ("python -m torch.distributed.launch --nnodes 2 pretrain_bert.py --a $UNSET", {"--a": None}),
        ("read -r -d '' CMD <<EOF\npretrain_t5.py --a 1\nEOF\nsrun python $CMD", {"--a": ("1",)}),
        ("python tools/checkpoint_util.py --a", {}),
    ],
)
def test_flags_of_a_launch_script_are_read_through_its_variables(text: str, flags: dict):
    assert {use.flag: use.value for use in flags_of_shell(text, "a.sh")[0]} == flags


def test_flags_of_a_configuration_are_its_keys():
    found, _ = flags_of_yaml("ENV: {A: 1}\nMODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --load: ${X}\n", "c.yaml")
    assert {use.flag: use.value for use in found} == {"--num-layers": ("4",), "--bf16": (), "--load": None}
    assert flags_of_yaml("--a: [", "c.yaml")[0] == []
