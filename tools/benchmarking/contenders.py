"""The contenders: our trainer, through the code that pretraining runs, and transformers' GPT-2 in a plain loop.

A contender is built once; step() takes one training step and returns {phase: seconds}.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.config import flag_of
from megatron.core.device import Device
from megatron.training.initialize import initialize_megatron
from megatron.training.train_step import train_step
from megatron.training.trainer import Trainer
from tools.benchmarking.work import Work

LR, CLIP = 1e-4, 1.0
WEIGHT_DECAY = 0.01


class Phases:
    """Sums the seconds of the phases of a step. Synchronizes the device before it reads the clock."""

    def __init__(self, device: Device):
        self.device, self.seconds = device, {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self.device.synchronize()
        start = time.perf_counter()
        yield
        self.device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class Batches:
    """Endless random microbatches, the same for every contender."""

    def __init__(self, work: Work, device: Device):
        self.work, self.device = work, device.torch_device
        self.generator = torch.Generator().manual_seed(1234)

    def __next__(self) -> dict[str, Tensor]:
        work = self.work
        shape = (work.micro_batch_size, work.seq_length + 1)
        text = torch.randint(work.vocab_size, shape, generator=self.generator)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(work.seq_length).expand(work.micro_batch_size, -1).contiguous(),
            "loss_mask": torch.ones(work.micro_batch_size, work.seq_length),
        }


class Ours:
    """This project's trainer, built from a command line like any run."""

    def __init__(self, work: Work, device_name: str):
        settings = asdict(work) | {  # the fields of `Work` are named as flags of training
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "train_iters": 1_000_000,
            "eval_iters": 0,
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP,
            "lr_decay_style": "constant",
            "tokenizer_type": "NullTokenizer",
            "vocab_size": work.vocab_size - 1,
            "mock_data": True,
            "device": device_name,
        }
        given = {flag_of(name): value for name, value in settings.items() if value is not False}
        argv = [word for flag, value in given.items() for word in ([flag] if value is True else [flag, str(value)])]
        with contextlib.redirect_stdout(None):
            runtime = initialize_megatron(argv=argv)
            self.trainer = Trainer(
                runtime,
                lambda sizes: (range(sizes[0]), None, None),  # has a length, is never read
                pretrain_gpt.model_provider,
                pretrain_gpt.forward_step,
            )
        self.device = runtime.device
        self.batches = {0: Batches(work, self.device)}
        self.phases = Phases(self.device)
        pipeline, optimizer = self.trainer.pipeline, self.trainer.optimizer
        timed = self.phases.timed
        pipeline.forward_step = timed("forward")(pipeline.forward_step)
        pipeline.run = timed("forward and backward")(pipeline.run)
        optimizer.step = timed("optimizer")(optimizer.step)
        optimizer.clip_factor = timed("clipping")(optimizer.clip_factor)

    def step(self) -> dict[str, float]:
        train_step(self.trainer.pipeline, self.trainer.optimizer, self.batches, first_sample=0, lr=LR)
        seconds = self.phases.take()
        seconds["backward"] = seconds.pop("forward and backward") - seconds["forward"]
        return seconds


class Transformers:
    """transformers' GPT-2 in a plain loop: float32 weights, optional bfloat16 autocast, torch's fused AdamW, clipping.

    It also gets the padded vocabulary and scaled_dot_product_attention, which make it faster. Needs transformers.
    """

    def __init__(self, work: Work, device_name: str, *, autocast: bool = False, compiled: bool = False):
        import transformers

        self.work, self.autocast = work, autocast
        self.device = Device.select(device_name)
        config = transformers.GPT2Config(
            n_layer=work.num_layers,
            n_embd=work.hidden_size,
            n_head=work.num_attention_heads,
            vocab_size=work.padded_vocab_size,
            n_positions=work.seq_length,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            use_cache=False,
            attn_implementation="sdpa",
        )
        torch.manual_seed(1234)
        self.model: nn.Module = transformers.GPT2LMHeadModel(config).to(self.device.torch_device).train()
        self.parameters = list(self.model.parameters())
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.batches, self.phases = Batches(work, self.device), Phases(self.device)

    def step(self) -> dict[str, float]:
        work, timed = self.work, self.phases.timed
        for _ in range(work.num_microbatches):
            tokens = next(self.batches)["tokens"].to(self.device.torch_device)
            with timed("forward"), torch.autocast(self.device.name, torch.bfloat16, enabled=self.autocast):
                loss = self.forward(input_ids=tokens, labels=tokens).loss / work.num_microbatches
            with timed("backward"):
                loss.backward()
        with timed("clipping"):
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
        with timed("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()  # training loops read the loss, which synchronizes
        return self.phases.take()


CONTENDERS: dict[str, Callable[[Work, str], Any]] = {
    "ours": Ours,
    "transformers fp32": Transformers,
    "transformers bf16 autocast": partial(Transformers, autocast=True),
    "transformers bf16 autocast, compiled": partial(Transformers, autocast=True, compiled=True),
}
