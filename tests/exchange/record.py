"""Record what transformers computes, in float64, for the tests to compare with: python tests/exchange/record.py [CASE ...]

Needs transformers, in an environment of its own: the tests need only the records. Scores, gradients (each as its product with
another draw of the weight) and the losses of five AdamW steps, of the models of `cases.py`, with the config.json, and names and
shapes of tensors as `save_pretrained` writes them.

transformers computes norms, softmax and rotary angles in float32 whatever the model's dtype; here the names of float32 mean
float64, so that a difference of 1e-10 is one of the model.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

torch.float = torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

import cases  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: E402

FOLDER = Path(__file__).parent / "records"
ALL = cases.CASES | cases.T5_CASES


def filled(config: dict) -> torch.nn.Module:
    """The model of a config, with the weights of `cases.weight` under the names of its folder."""
    model = kind_of(config).from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    return model.to(torch.float64)


def kind_of(config: dict) -> type:
    return AutoModelForSeq2SeqLM if config["model_type"] == "t5" else AutoModelForCausalLM


def tensors_of(root: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(root / "model.safetensors", "pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def record(name: str) -> None:
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
        model, told = kind_of(wanted).from_pretrained(
            root, attn_implementation="eager", dtype=torch.float64, output_loading_info=True
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    model.eval()
    ids = torch.tensor(cases.ids())
    scores = scores_of_texts(model) if name in cases.T5_CASES else model(ids).logits
    made = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "config": config,
        "shapes": shapes,
        "scores": scores.tolist(),
        "gradients": gradients_of(model, ids, shapes),
        "losses": losses_of(model, ids),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(made) + "\n")
    print(
        f"{name}: scores up to {scores.abs().max().item():.2f}, losses {made['losses'][0]:.4f} to {made['losses'][-1]:.4f}"
    )


def scores_of_texts(model: torch.nn.Module) -> torch.Tensor:
    encoder, seen, decoder, _ = (torch.tensor(x) for x in cases.texts())
    return model(input_ids=encoder, attention_mask=seen, decoder_input_ids=decoder).logits


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
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
        if name not in shapes:  # version 5 has another name for the module than for the tensor of a folder
            name = name.replace("lm_head", "embed_out")
        found[name] = (
            (parameter.grad * torch.tensor(cases.weight(f"direction of {name}", parameter.shape))).sum().item()
        )
    return found


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


if __name__ == "__main__":
    for case in sys.argv[1:] or ALL:
        record(case)
