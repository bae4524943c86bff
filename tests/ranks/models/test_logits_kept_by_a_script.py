"""Code of a script that reads the logits again after the loss, which may use their memory, finds them as they were.

The oracle is the same model called without labels, and torch's cross entropy of its logits in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from tiny_bert import BERT
from tiny_run import GPT, LLAMA, TINY_GPT2, TINY_LLAMA, VOCAB, Subject, Texts
from tiny_t5 import CONFIGS, T5
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.models.common.vocab_parallel_lm_head import LanguageModelHead
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.zero_engine_for_any_module import Engine, EngineConfig

DTYPES = {"float64": {}, "float32": {"fp64": False}, "bfloat16": {"fp64": False, "bf16": True}}
WITHOUT_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, tuple[Subject, ModelConfig]] = {
    "gpt2": (GPT, replace(TINY_GPT2, **WITHOUT_DROPOUT)),
    "gpt, logits multiplied": (GPT, replace(TINY_LLAMA, logit_multiplier=0.5, add_output_bias=True)),
    "gpt, logits capped": (GPT, replace(TINY_LLAMA, final_logit_softcapping=3.0)),
    "bert": (BERT, replace(TINY_GPT2, **WITHOUT_DROPOUT)),
    "t5": (T5, replace(CONFIGS["t5"], **WITHOUT_DROPOUT)),
}


def model_of(mesh: Mesh, subject: Subject, config: ModelConfig) -> nn.Module:
    keys = SampleDropoutKeys(3)
    keys.samples = (0, 1)
    context = LayerContext.from_mesh(mesh, config.params_dtype, keys)
    layers = range(config.all_layers)
    model = subject.make(config, vocab_size=VOCAB, layers=layers, context=context, pre_process=True, post_process=True)
    initialize_parameters(model, 3, mesh)
    return model


def losses_of(model: nn.Module, subject: Subject) -> tuple[Tensor, Tensor]:
    """Return (the losses [b, s], the labels [b, s]) of two samples."""
    rows = [subject.sample(number, Texts()) for number in range(2)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    output, _ = subject.forward_step(iter([batch]), model)
    return output[0] if isinstance(output, tuple) else output, batch["labels"]


def module_of_logits(model: nn.Module) -> nn.Module:
    return getattr(model, "word_bias", None) or model.language_model.output_layer


def keep(kept: list[Tensor], module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.shape[-1] >= VOCAB:
        kept.append(output)


def as_of_megatron(kept: list[Tensor], module: nn.Module, inputs: Any, output: Any) -> None:
    keep(kept, module, inputs, output)


as_of_megatron.__module__ = "megatron.core.distributed.zero3_param_fetcher"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["module", "global", "ours"])
def test_a_forward_hook_may_keep_the_logits(name: str, dtype: str, how: str):
    """A hook of this package keeps nothing, so that the memory of the logits is used: the gradient of float32 needs no other."""
    subject, config = MODELS[name]

    def work(mesh: Mesh) -> None:
        model = model_of(mesh, subject, replace(config, **DTYPES[dtype]))
        kept: list[Tensor] = []
        hook = partial(as_of_megatron if how == "ours" else keep, kept)
        if how == "global":
            handle = register_module_forward_hook(hook)
        else:
            handle = module_of_logits(model).register_forward_hook(hook)
        try:
            losses, labels = losses_of(model, subject)
        finally:
            handle.remove()
        logits = kept[-1]
        found = [logits.detach().transpose(0, 1).double().clone()]
        losses.sum().backward()
        found.append(logits.detach().transpose(0, 1).double().clone())
        assert torch.equal(*found) == (how != "ours")
        if how == "ours":
            return
        used = labels >= 0
        exact = found[0][..., :VOCAB].transpose(1, 2)  # [b, v, s]
        expected = functional.cross_entropy(exact, labels.clamp(min=0), reduction="none")
        torch.testing.assert_close(losses.double()[used], expected[used], rtol=1e-5, atol=1e-5)

    run_ranks({}, work)


class WithEntropy(GPTModel):
    """Adds the entropy of each prediction to its loss."""

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = super().losses(logits, labels)
        log_probabilities = logits[..., :VOCAB].log_softmax(-1)
        return losses - 0.1 * (log_probabilities.exp() * log_probabilities).sum(-1)


class WithEntropyInForward(GPTModel):
    def forward(self, tokens: Tensor, positions: Tensor, mask: Any = None, labels: Tensor | None = None) -> Tensor:
        logits = self.language_model.logits(self.language_model(tokens, positions, mask))
        losses = self.losses(logits, labels.t())
        log_probabilities = logits[..., :VOCAB].log_softmax(-1)
        return self.batch_first(losses - 0.1 * (log_probabilities.exp() * log_probabilities).sum(-1))


class KeepingHead(LanguageModelHead):
    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        self.kept = super().logits(x, weight)
        return self.kept


class WithKeepingHead(GPTModel):
    def __init__(self, config: ModelConfig, **parts: Any):
        super().__init__(config, **parts)
        self.language_model.output_layer = KeepingHead(config, parts["vocab_size"], parts["context"])

    def forward(self, *args: Any, **options: Any) -> Tensor:
        losses = super().forward(*args, **options)
        log_probabilities = self.language_model.output_layer.kept[..., :VOCAB].log_softmax(-1)
        return losses - 0.1 * (log_probabilities.exp() * log_probabilities).sum(-1).t()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("make", [WithEntropy, WithEntropyInForward, WithKeepingHead])
def test_a_script_may_read_the_logits_beside_the_loss(make: Callable, dtype: str):
    config = replace(LLAMA, num_layers=1, **DTYPES[dtype])
    subject = replace(GPT, make=lambda config, **parts: make(config, positions=8, **parts))

    def work(mesh: Mesh) -> None:
        model = model_of(mesh, subject, config)
        losses, labels = losses_of(model, subject)
        grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
        plain = model_of(mesh, GPT, config)
        rows = [GPT.sample(number, Texts()) for number in range(2)]
        tokens, positions = (torch.stack([row[key] for row in rows]) for key in ("tokens", "positions"))
        log_probabilities = plain(tokens, positions)[..., :VOCAB].log_softmax(-1)
        expected = functional.nll_loss(log_probabilities.transpose(1, 2), labels, reduction="none")
        expected = expected - 0.1 * (log_probabilities.exp() * log_probabilities).sum(-1)
        tolerance = 1e-5 if dtype == "float32" else 1e-12
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
        of_plain = torch.autograd.grad(expected.sum(), list(plain.parameters()))
        torch.testing.assert_close(grads, of_plain, rtol=tolerance, atol=10 * tolerance)

    run_ranks({}, work)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["gpt2", "gpt, logits capped", "t5"])
def test_the_engine_goes_backward_twice_through_the_losses(name: str, stage: int, dtype: str):
    """3/4 of the loss after 1/4 of it give the update of all of it."""
    subject, config = MODELS[name]
    config = replace(config, **DTYPES[dtype])

    def work(mesh: Mesh) -> list[dict[str, Tensor]]:
        states = []
        for parts in ((1.0,), (0.25, 0.75)):
            model = model_of(mesh, subject, config)
            zero = EngineConfig(data_parallel=DataParallelConfig(zero_stage=stage))
            engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero, mesh)
            loss = losses_of(engine, subject)[0].mean()
            for part in parts:
                engine.backward(loss * part, retain_graph=part < 0.5)
            engine.step()
            states.append(engine.module_state_dict())
        return states

    for whole, in_parts in run_ranks({"dp": 2}, work):
        tolerance = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2}[dtype]
        torch.testing.assert_close(in_parts, whole, rtol=tolerance, atol=tolerance)
