"""Record what transformers computes, in float64, for the tests to compare with: python tests/support/exchange/record.py [--check] [CASE ...]

Needs transformers, in an environment of its own: the tests need only the records. Scores, gradients (each as its product with
another draw of the weight) and the losses of five AdamW steps, of the models of `cases.py`, with the config.json, and names and
shapes of tensors as `save_pretrained` writes them.

transformers computes norms, softmax and rotary angles in float32 whatever the model's dtype; here the names of float32 mean
float64, so that a difference of 1e-10 is one of the model.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

torch.float = torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

import cases  # noqa: E402
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
)

FOLDER = Path(__file__).parent / "records"
ALL = cases.CASES | cases.T5_CASES | cases.BERT_CASES
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # its other experts have no float64
# Names of version 5 -> of its folders.
GRANITE_MOE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
KINDS = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForPreTraining}


def filled(config: dict) -> torch.nn.Module:
    """The model of a config, with the weights of `cases.weight` under the names of its folder."""
    model = kind_of(config).from_config(AutoConfig.for_model(**config), **EAGER).eval()
    return model.to(torch.float64)


def kind_of(config: dict) -> type:
    return KINDS.get(config["model_type"], AutoModelForCausalLM)


def tensors_of(root: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(root / "model.safetensors", "pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def record(name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wanted = ALL[name]
        filled(wanted).save_pretrained(root)
        config, shapes = json.loads((root / "config.json").read_text()), tensors_of(root)
        if wanted.get("tie_word_embeddings") is False and config["model_type"] == "t5":
            # Version 5 ties a T5 that it makes; one that it reads with a head of its own it leaves untied, as version 4 does.
            config["tie_word_embeddings"], shapes["lm_head.weight"] = False, shapes["shared.weight"]
        cases.write_folder(root, {"config": config, "shapes": shapes})
        (root / "model.safetensors").unlink()
        # Several, since a dynamic scaling remembers the longest text that its model has seen.
        model, trained, asked = (loaded(root, wanted) for _ in range(3))
    ids = torch.tensor(cases.ids())
    made = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "config": config,
        "shapes": shapes,
        **scores_of(model, name, ids),
        "gradients": gradients_of(trained, ids, shapes),
        "losses": losses_of(trained, ids),
    }
    made |= {} if name in cases.BERT_CASES else {"greedy": greedy_ids(asked, name)}
    return made | ({"each once": greedy_ids(asked, name, no_repeat_ngram_size=1)} if name in cases.T5_CASES else {})


def scores_of(model: torch.nn.Module, name: str, ids: torch.Tensor) -> dict[str, list]:
    if name in cases.BERT_CASES:
        words, order = heads_of_sentences(model)
        return {"scores": words.tolist(), "order": order.tolist()}
    return {"scores": (scores_of_texts(model) if name in cases.T5_CASES else model(ids).logits).tolist()}


def heads_of_sentences(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    given = {name: torch.tensor(x) for name, x in cases.sentences().items()}
    made = model(input_ids=given["text"], attention_mask=given["seen"], token_type_ids=given["types"])
    return made.prediction_logits, made.seq_relationship_logits


def greedy_ids(model: torch.nn.Module, name: str, **options: int) -> list[list[int]]:
    """The ids that follow each prompt, each prompt alone; of two stacks those that the decoder writes after its first. options:
    of transformers' `generate`."""
    given, new = cases.prompts(name)
    two_stacks = model.config.is_encoder_decoder
    model.generation_config.eos_token_id = None
    model.generation_config.decoder_start_token_id = 0 if two_stacks else None
    found = []
    for prompt in given:
        ids = torch.tensor([prompt])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **options
        )
        found.append(said[0, 1 if two_stacks else len(prompt) :].tolist())
    return found


def loaded(root: Path, wanted: dict) -> torch.nn.Module:
    model, told = kind_of(wanted).from_pretrained(root, dtype=torch.float64, output_loading_info=True, **EAGER)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


def scores_of_texts(model: torch.nn.Module) -> torch.Tensor:
    encoder, seen, decoder, _ = (torch.tensor(x) for x in cases.texts())
    return model(input_ids=encoder, attention_mask=seen, decoder_input_ids=decoder).logits


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    if model.config.model_type == "bert":
        given = {name: torch.tensor(x) for name, x in cases.sentences().items()}
        words, order = heads_of_sentences(model)
        masked = given["masked"].bool()
        words_loss = torch.nn.functional.cross_entropy(words[masked], given["asked"][masked])
        return words_loss + torch.nn.functional.cross_entropy(order, given["order"])
    if model.config.is_encoder_decoder:
        asked = torch.tensor(cases.texts()[3])
        return torch.nn.functional.cross_entropy(scores_of_texts(model).flatten(0, 1), asked.flatten())
    scores = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def gradients_of(model: torch.nn.Module, ids: torch.Tensor, shapes: dict) -> dict[str, float]:
    """The product of each parameter's gradient with a draw of its own."""
    loss_of(model, ids).backward()
    found = {}
    for name, parameter in model.named_parameters():
        for tensor, gradient in as_in_a_folder(name, parameter.grad, shapes):
            direction = torch.tensor(cases.weight(f"direction of {tensor}", gradient.shape))
            found[tensor] = (gradient * direction).sum().item()
    return found


def as_in_a_folder(name: str, x: torch.Tensor, shapes: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """Version 5 has other names and stacks for some parameters than for the tensors of a folder."""
    for today, then in GRANITE_MOE.items():
        name = name.replace(today, then) if name.replace(today, then) in shapes else name
    if name in shapes:
        yield name, x
    elif "lm_head" in name:
        yield name.replace("lm_head", "embed_out"), x
    elif name.replace(".mlp.", ".block_sparse_moe.") in shapes:
        yield name.replace(".mlp.", ".block_sparse_moe."), x
    else:  # experts: [experts, 2 f, h] or [experts, h, f]
        stem, part = name.rsplit(".", 1)
        is_mixtral = not any(f"{stem}.0." in tensor for tensor in shapes)
        stem = stem.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else stem
        gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        for i, expert in enumerate(x):
            if part == "down_proj":
                yield f"{stem}.{i}.{down}.weight", expert
            else:
                for of, half in zip((gate, up), expert.chunk(2)):
                    yield f"{stem}.{i}.{of}.weight", half


def losses_of(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    """The losses of five steps of AdamW: rate 0.01, weight decay 0.1 on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def numbers(made: dict) -> torch.Tensor:
    """Scores, gradients and losses in one row."""
    parts = [made["scores"], made.get("order", []), [made["gradients"][name] for name in sorted(made["gradients"])]]
    return torch.cat([torch.tensor(part, dtype=torch.float64).flatten() for part in (*parts, made["losses"])])


def main(words: list[str]) -> int:
    """With --check compare with what is recorded, to 1e-10, and write nothing; else write."""
    check, wrong = "--check" in words, 0
    for name in [word for word in words if word != "--check"] or ALL:
        made = record(name)
        path, says = FOLDER / f"{name}.json", f"losses {made['losses'][0]:.4f} to {made['losses'][-1]:.4f}"
        if check:
            kept = json.loads(path.read_text())
            far = (numbers(made) - numbers(kept)).abs().max().item()
            same = all(made.get(key) == kept.get(key) for key in ("shapes", "greedy", "each once"))
            wrong += not (same and far < 1e-10)
            says = f"differs by {far:.1e}" + ("" if same else ", and in shapes or ids")
        else:
            path.write_text(json.dumps(made) + "\n")
        print(f"{name}: {says}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
