"""Adapters of finetune_gpt.py as folders of PEFT, merged into their base's Hugging Face folder, and taken out again.

    python tools/lora.py --load checkpoints/adapters --save-peft adapter-peft
    python tools/lora.py --load checkpoints/adapters --base Llama-3.2-1B --merge Llama-3.2-1B-tuned
    python tools/lora.py --adapter adapter-peft --base Llama-3.2-1B --merge Llama-3.2-1B-tuned
    python tools/lora.py --adapter adapter-peft --base Llama-3.2-1B-tuned --unmerge Llama-3.2-1B-again

Products and sums are float32 and rounded once. What --unmerge gives is near the base, and in bfloat16 not equal to it: keep
the base.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, build, option
from megatron.core.peft.lora_config import WHOLE, LoRAConfig
from tools.errors import answer_help, run_tool, tool_parser


@dataclass(frozen=True)
class LoRAToolConfig(FlagConfig):
    """Adapters to write or merge."""

    load: str | None = option(None, "folder of checkpoints with adapters", metavar="DIR")
    iteration: int | None = option(None, "iteration of --load; default: the latest")
    adapter: str | None = option(None, "folder of PEFT with adapters, instead of --load", metavar="DIR")
    base: str | None = option(None, "Hugging Face folder of the adapters' base", metavar="DIR")
    save_peft: str | None = option(None, "folder of PEFT to write, which must not exist", metavar="DIR")
    merge: str | None = option(None, "Hugging Face folder to write: --base with the adapters added", metavar="DIR")
    unmerge: str | None = option(None, "Hugging Face folder to write: --base without the adapters", metavar="DIR")
    model_type: str | None = option(
        None,
        "model_type of the base; default: that of the folder on which the run began, or one that describes the model",
    )

    def problems(self) -> list[str]:
        problems = []
        if (self.load is None) == (self.adapter is None):
            problems.append("give the adapters as --load or as --adapter")
        if [self.save_peft, self.merge, self.unmerge].count(None) != 2:
            problems.append("give one of --save-peft, --merge and --unmerge")
        elif self.save_peft is not None and self.load is None:
            problems.append("--save-peft writes the adapters of --load; give it")
        elif self.save_peft is None and self.base is None:
            problems.append("--merge and --unmerge change the weights of --base; give it")
        return problems


if __name__ == "__main__":
    answer_help(lambda: tool_parser(__doc__, [LoRAToolConfig]))

import torch

from megatron.convert.families.read_and_write_hf_config import kind_of
from megatron.convert.families.registry import FAMILIES
from megatron.convert.peft_folder import Pair, base_of_state, merge_adapter, write_peft_folder
from megatron.convert.plan_hf_folder import model_in_state
from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.sharding.boxes import whole

_MODEL = "model/"
_FACTOR = ".lora_a"


def adapters_of(folder: str, iteration: int | None) -> tuple[dict[tuple[str, str], Pair], dict]:
    """Return the adapters of a checkpoint, (linear, part) -> pair, and its state. Raises ConfigError if it has none."""
    checkpoint = open_checkpoint(folder, iteration)
    tensors = {}
    for name, record in checkpoint.manifest.tensors.items():
        if name.startswith(_MODEL) and ".lora_" in name:
            tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
            box = whole(record.shape)
            tensors[name] = LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)
    if not tensors:
        raise ConfigError(f"--load {folder} holds no adapters; give a checkpoint of finetune_gpt.py --lora-rank")
    checkpoint.read_into(tensors)
    pairs = {}
    for name, local in tensors.items():
        linear, found, part = name.removeprefix(_MODEL).partition(_FACTOR)
        if found:
            b = tensors[name.replace(_FACTOR, ".lora_b")].tensor
            # the output layer's product is a submodule of it
            pairs[linear.removesuffix(".linear"), part.removeprefix("_") or WHOLE] = Pair(local.tensor, b)
    return pairs, checkpoint.state


def export(config: LoRAToolConfig, out: Path) -> int:
    """Write the adapters of --load as a folder of PEFT; return their number."""
    pairs, state = adapters_of(config.load, config.iteration)
    model, vocab_size = model_in_state(state, config.load)
    values = {**state["config"]["own_model"], "lora_dropout": state["config"]["own"].get("lora_dropout", 0.0)}
    lora = build(LoRAConfig, values)
    known_kind, folder = base_of_state(state)
    kind = kind_of(state["model"], model, vocab_size, config.model_type or known_kind)
    ambiguous = write_peft_folder(out, pairs, lora, FAMILIES[kind], model, base=config.base or folder)
    if ambiguous and config.save_peft is not None:
        others = " and others" if len(ambiguous) > 1 else ""
        print(
            f"WARNING: {ambiguous[0]}{others} is named as experts' matrices are, and PEFT 0.21 with transformers 5 takes it for "
            "theirs in some families, such as qwen3_moe; use the folder that --merge writes there"
        )
    return len(pairs)


def work(config: LoRAToolConfig) -> None:
    """Do what the flags ask for, and print it."""
    if config.save_peft is not None:
        count = export(config, Path(config.save_peft))
        print(f"{config.load}: {count} adapters written to {config.save_peft} for PEFT")
        return
    out = config.merge or config.unmerge
    with tempfile.TemporaryDirectory() as temporary:
        adapter = Path(temporary) / "adapter"
        if config.adapter is not None:
            adapter = Path(config.adapter)
        else:
            export(config, adapter)
        count = merge_adapter(Path(config.base), adapter, Path(out), sign=1 if config.merge else -1)
    done = "added to" if config.merge else "subtracted from"
    print(f"{config.adapter or config.load}: {done} {count} weights of {config.base}, written to {out}")


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [LoRAToolConfig], work, arguments)


if __name__ == "__main__":
    sys.exit(main())
