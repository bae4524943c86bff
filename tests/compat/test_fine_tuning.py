"""Fine-tuning in float64 against transformers and peft on the same weights and batches, and tuned folders in their `generate`.

    python3 -m venv v; v/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.0
    TRANSFORMERS_PYTHONS=v/bin/python python -m pytest tests/compat/test_fine_tuning.py

The first interpreter that TRANSFORMERS_PYTHONS names has an environment of its own, with peft, and reads files alone.
"""

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from sft_folder import (
    CONFIGS,
    VOCABULARY,
    FinetuneScript,
    chats,
    counting_chats,
    write_lines,
    write_model,
    write_tokenizer,
)

from megatron.convert.formats.safetensors_header import read_header
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.sft_dataset import build_sft_datasets
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.training import trainer as trainer_module
from tools import lora as lora_tool

PYTHONS = [path for path in os.environ.get("TRANSFORMERS_PYTHONS", "").split(":") if path]
ORACLE = Path(__file__).with_name("fine_tuning_oracle.py")


def has_peft() -> bool:
    return bool(PYTHONS) and not subprocess.run([PYTHONS[0], "-c", "import peft"], capture_output=True).returncode


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not has_peft(), reason="TRANSFORMERS_PYTHONS names no interpreter with peft; see the head of this file"
    ),
]

STEPS, BATCH, LENGTH, RATE = 10, 4, 96, 1e-3
_SIZES = {
    **{"vocab_size": VOCABULARY + 5, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 256, "head_dim": 8},
    **{"bos_token_id": None, "eos_token_id": VOCABULARY - 1, "pad_token_id": None},
}
BASES: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "gpt2": CONFIGS["gpt2"],
    "qwen3": {"model_type": "qwen3", **_SIZES, "tie_word_embeddings": False},
    "mixtral": {
        **{"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **{key: value for key, value in _SIZES.items() if key != "head_dim"}},
        **{
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        **{"mlp_only_layers": [1], "tie_word_embeddings": False},
    },
    "granitemoe": {
        **{"model_type": "granitemoe", **{key: value for key, value in _SIZES.items() if key != "head_dim"}},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.5, "logits_scaling": 2.0},
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
        **{"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma3": {
        **{"model_type": "gemma3_text", **_SIZES, "sliding_window": 24, "query_pre_attn_scalar": 9},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
# whose adapters are others than those of a Llama; a GPT-2 has one module for queries and values, and PEFT's all-linear is experts too
LEFT_OUT = {("gpt2", "queries and values"), ("mixtral", "rsLoRA on all linears")}
MIXTURES = ("mixtral", "qwen2_moe", "granitemoe", "gpt_oss")
_OF_EXPERTS = ("experts", "experts of two ranks", "rsLoRA on one matrix of experts")
_SOME = {"mixtral": ["k_proj", "o_proj"], "gpt2": ["c_attn", "c_fc"], "gemma3": ["q_proj", "o_proj", "down_proj"]}
ADAPTERS = {
    "rsLoRA on all linears": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True},
    "some linears": {"r": 2, "lora_alpha": 8},
    "queries and values": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "experts": {
        **{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]},
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    # as PEFT reads adapters of transformers 4
    "experts of two ranks": {
        **{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        **{"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 8}},
    },
    "rsLoRA on one matrix of experts": {
        **{"r": 2, "lora_alpha": 4, "use_rslora": True, "target_modules": []},
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
}
LEFT_OUT |= {(kind, name) for kind in set(BASES) - {*MIXTURES} for name in _OF_EXPERTS}
LEFT_OUT |= {(kind, name) for kind in set(MIXTURES) - {"mixtral"} for name in set(ADAPTERS) - {*_OF_EXPERTS}}


def settings_of(kind: str, name: str) -> dict[str, Any]:
    some = _SOME.get(kind, ["k_proj", "gate_proj", "lm_head"])
    settings = {"target_modules": some, "fan_in_fan_out": kind == "gpt2"} | ADAPTERS[name]
    if kind == "granitemoe":
        names = settings.get("target_parameters", [])
        settings["target_parameters"] = [name.replace("mlp.", "block_sparse_moe.") for name in names]
    return settings


def ask(folder: Path, *jobs: tuple[str, dict[str, Any]], dtype: str = "float64") -> list[Any]:
    """What fine_tuning_oracle.py makes of jobs."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHONS[0], str(ORACLE), str(path), dtype], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads(path.with_suffix(".out.json").read_text())


def our_losses(monkeypatch: pytest.MonkeyPatch, flags: str) -> list[float]:
    """The losses of a run of finetune_gpt.py, with all their digits."""
    losses = []

    def recorded(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        losses.append(result.losses["lm loss"])
        return result

    def work(mesh: Mesh) -> None:
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            trainer.run()

    step, script = trainer_module.train_step, FinetuneScript(flags)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "train_step", recorded)
        run_ranks({}, work)
    return losses


def flags_of(base: Path, data: Path, more: str = "") -> str:
    sizes = f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {STEPS} --log-interval 100"
    rates = f"--lr {RATE} --lr-decay-style constant --weight-decay 0 --split 1,0,0 --device cpu --fp64"
    return f"{sizes} {rates} --pretrained-checkpoint {base} --data-path {data} {more}"


def write_batches(base: Path, data: Path, packed: bool, out: Path) -> None:
    """Write the arrays [steps, rows, s] of the samples that a run takes."""
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(base)))
    resets = {"reset_position_ids": True, "reset_attention_mask": True}
    config = DataConfig(data_path=[str(data)], split="1,0,0", seq_length=LENGTH, sft=True, sft_packing=packed, **resets)
    train, _, _ = build_sft_datasets(config, tokenizer, [STEPS * BATCH, 0, 0], 1234, say=lambda line: None)
    items = [train[i] for i in range(STEPS * BATCH)]
    names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")
    np.savez(out, **{name: np.stack([item[name] for item in items]).reshape(STEPS, BATCH, LENGTH) for name in names})


def tensors_of(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """name -> dtype, shape and bytes of each tensor of adapters."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    return {
        name: ((tensor.dtype, tuple(tensor.shape)), data[tensor.start : tensor.start + tensor.nbytes])
        for name, tensor in read_header(path).items()
        if ".lora_" in name  # PEFT adds the frozen weight of an output layer
    }


# A GPT-OSS without adapters has other losses of packed rows there; its adapters are compared by bits and logits.
@pytest.mark.parametrize("kind", [kind for kind in BASES if kind != "gpt_oss"])
def test_ten_steps_have_the_losses_of_transformers_and_peft(kind: str, tmp_path: Path, monkeypatch):
    base, data = tmp_path / "base", write_lines(tmp_path / "chats.jsonl", chats(30))
    names = [name for name in ADAPTERS if (kind, name) not in LEFT_OUT]
    adapters = {name: tmp_path / f"adapter {i}".replace(" ", "-") for i, name in enumerate(names)}
    made = [
        ("write_adapter", {"folder": adapters[name], "base": base, "settings": settings_of(kind, name)})
        for name in names
    ]
    ask(tmp_path, ("write_base", {"folder": base, "config": BASES[kind]}), *made)
    write_tokenizer(base)

    ours, jobs = [], []
    for packed in (True, False):
        batches = tmp_path / f"batches-{packed}.npz"
        write_batches(base, data, packed, batches)
        for i, name in enumerate([None, *names]):
            adapter = adapters.get(name)
            more = f"{'' if packed else '--no-sft-packing'} --save {tmp_path}/run-{packed}-{i}"
            more += f" --lora-adapter {adapter}" if adapter else ""
            ours.append(our_losses(monkeypatch, flags_of(base, data, more)))
            arguments = {"base": base, "adapter": adapter, "batches": batches, "packed": packed, "lr": RATE}
            jobs.append(("losses", arguments | {"out": tmp_path / f"theirs-{packed}-{i}" if adapter else None}))
    theirs = ask(tmp_path, *jobs)
    for i, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        far = max(abs(a - b) for a, b in zip(got, expected, strict=True))
        print(kind, [None, *names][i % (1 + len(names))], "packed" if i <= len(names) else "padded", f"{far:.1e}")
        assert len(got) == STEPS and far < 1e-9 and got[-1] < got[0]

    # the trained adapters, too
    for i in range(1, 1 + len(names)):
        exported = tmp_path / f"exported-{i}"
        assert lora_tool.main(["--load", f"{tmp_path}/run-True-{i}", "--save-peft", str(exported)]) == 0
        mine, trained = tensors_of(exported), tensors_of(tmp_path / f"theirs-True-{i}")
        assert {name: x[0] for name, x in mine.items()} == {name: x[0] for name, x in trained.items()}
        for name, (_, values) in mine.items():
            far = abs(np.frombuffer(values) - np.frombuffer(trained[name][1])).max()
            assert far < 1e-7, name  # Adam divides by the root of small numbers


def test_adapters_keep_their_bits_both_ways(tmp_path: Path, monkeypatch):
    """PEFT -> ours -> PEFT, and ours -> PEFT -> ours; and a merged folder has the logits of the adapters in PEFT."""
    data = write_lines(tmp_path / "chats.jsonl", chats(30))
    cases = [case for case in product(BASES, ADAPTERS) if case not in LEFT_OUT]
    bases = {kind: tmp_path / kind for kind in BASES}
    folders = {case: tmp_path / f"case-{i}" for i, case in enumerate(cases)}
    jobs = [("write_base", {"folder": folder, "config": BASES[kind]}) for kind, folder in bases.items()]
    for (kind, name), folder in folders.items():
        settings = settings_of(kind, name)
        jobs.append(("write_adapter", {"folder": folder / "theirs", "base": bases[kind], "settings": settings}))
    ask(tmp_path, *jobs)

    # read and written without a step, and after steps
    unchanged = "--lr 1e-300 --train-iters 1"
    for (kind, _), folder in folders.items():
        write_tokenizer(bases[kind])
        theirs = f"--lora-adapter {folder}/theirs"
        our_losses(monkeypatch, flags_of(bases[kind], data, f"{theirs} --save {folder}/kept {unchanged}"))
        our_losses(monkeypatch, flags_of(bases[kind], data, f"{theirs} --save {folder}/trained --train-iters 2"))
        for run, out in (("kept", "ours"), ("trained", "exported")):
            assert lora_tool.main(["--load", f"{folder}/{run}", "--save-peft", f"{folder}/{out}"]) == 0
        assert tensors_of(folder / "ours") == tensors_of(folder / "theirs")
        assert tensors_of(folder / "exported") != tensors_of(folder / "theirs")
        words = ["--load", f"{folder}/trained", "--base", str(bases[kind]), "--merge", f"{folder}/merged"]
        assert lora_tool.main(words) == 0

    jobs = []
    for (kind, _), folder in folders.items():
        of = {"base": bases[kind], "adapter": folder / "exported"}
        jobs.append(("resave", of | {"out": folder / "resaved"}))
        jobs += [("logits", of), ("logits", {"base": folder / "merged", "adapter": None})]
    found = ask(tmp_path, *jobs)
    for i, ((kind, name), folder) in enumerate(folders.items()):
        theirs = f"--lora-adapter {folder}/resaved --save {folder}/again {unchanged}"
        our_losses(monkeypatch, flags_of(bases[kind], data, theirs))
        first, _ = lora_tool.adapters_of(f"{folder}/trained", None)
        second, _ = lora_tool.adapters_of(f"{folder}/again", None)
        assert first.keys() == second.keys()
        assert all(torch.equal(x, y) for key in first for x, y in zip(first[key], second[key]))
        adapted, merged = (np.array(x) for x in found[3 * i + 1 : 3 * i + 3])
        print(kind, name, "merged", f"{abs(adapted - merged).max():.1e}")
        assert abs(adapted - merged).max() < 1e-6


@pytest.mark.parametrize("one_id", [False, True], ids=["ids of their own", "one id for pad, text and turn"])
def test_a_tuned_folder_ends_its_answers_in_generate(one_id: bool, tmp_path: Path, monkeypatch):
    """Of 100 prompts of the training set's form 95 end with the end-of-turn token within 64 tokens, greedy."""
    base, data = (
        write_model(tmp_path / "base", one_id=one_id),
        write_lines(tmp_path / "chats.jsonl", counting_chats(100)),
    )
    more = f"--train-iters 200 --lr 1e-2 --no-sft-packing --save-hf {tmp_path}/tuned"
    our_losses(monkeypatch, flags_of(base, data, more).replace("--fp64", ""))
    (folder,) = (tmp_path / "tuned").iterdir()
    prompts = [record["messages"][0]["content"] for record in counting_chats(100)]
    (found,) = ask(tmp_path, ("endings", {"folder": folder, "prompts": prompts, "most": 64}), dtype="float32")
    print(found["ended"], found["texts"][:3])
    assert found["ended"] >= 95
