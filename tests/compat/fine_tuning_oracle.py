"""What transformers and peft do with folders and batches, for test_fine_tuning.py: python fine_tuning_oracle.py JOBS.json DTYPE

JOBS.json is a list of [what, arguments]; the results are written beside it as JOBS.out.json. transformers computes norms, softmax and
rotary angles in float32 whatever the model's dtype; with DTYPE float64 the names of float32 mean float64, so that a difference of 1e-9
is one of the training.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

if sys.argv[2:] == ["float64"]:
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)

import peft
import transformers

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}


def write_base(folder: str, config: dict[str, Any]) -> None:
    """Write the folder of a config with drawn weights, all of them in float64."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def write_adapter(folder: str, base: str, settings: dict[str, Any]) -> None:
    """Write adapters of which both factors are drawn."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **EAGER)
    lora = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(model, lora).to(torch.float32).save_pretrained(folder)


def adapted(base: str, adapter: str | None, *, is_trainable: bool = False) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **EAGER)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable).to(torch.float32)
    return model


def losses(
    base: str, adapter: str | None, batches: str, packed: bool, lr: float, out: str | None = None
) -> list[float]:
    """Train on batches [steps, rows, s], one optimizer step each, and return the loss before each step.

    packed: each row is one text of several examples, whose positions begin at 0; else each row is an example with padding behind it.
    """
    model = adapted(base, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    found = []
    for tokens, labels, mask, positions, documents in zip(*np.load(batches).values(), strict=True):
        tokens, labels, positions = (torch.from_numpy(x) for x in (tokens, labels, positions))
        labels = torch.where(torch.from_numpy(mask) > 0, labels, -100)
        total = torch.zeros(())
        if packed:
            for row in range(len(tokens)):
                length = int(np.flatnonzero(mask[row])[-1]) + 1  # without the padding
                inputs = {
                    "input_ids": tokens[row : row + 1, :length],
                    "position_ids": positions[row : row + 1, :length],
                }
                logits = model(**inputs, use_cache=False).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits, labels[row, :length], reduction="sum")
        else:
            seen = torch.from_numpy((documents == 0).astype(np.int64))
            logits = model(input_ids=tokens, attention_mask=seen, use_cache=False).logits
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append(loss.item())
    if out is not None:
        model.save_pretrained(out)
    return found


def resave(base: str, adapter: str, out: str) -> None:
    """Read a folder of adapters, and write it."""
    adapted(base, adapter).save_pretrained(out)


def logits(base: str, adapter: str | None) -> list[list[float]]:
    with torch.no_grad():
        return adapted(base, adapter).eval()(torch.arange(40)[None] * 6).logits[0].tolist()


def endings(folder: str, prompts: list[str], most: int) -> dict[str, Any]:
    """Generate greedily by the settings of the folder; return how many end before `most` new tokens, and the last tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER).eval()
    ended, texts = 0, []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=most)[0, inputs["input_ids"].shape[1] :]
        ended += tokenizer.convert_ids_to_tokens(int(made[-1])) == "<|im_end|>"
        texts.append(tokenizer.decode(made))
    return {"ended": ended, "texts": texts}


JOBS = {x.__name__: x for x in (write_base, write_adapter, losses, resave, logits, endings)}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    results = [JOBS[what](**arguments) for what, arguments in json.loads(path.read_text())]
    path.with_suffix(".out.json").write_text(json.dumps(results))
