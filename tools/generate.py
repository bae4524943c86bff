"""Continue texts with a trained model: prompt and continuation go to stdout as they come, in one process.

    python tools/generate.py --load checkpoints --prompt "Once upon a time" --temperature 0.8 --top-p 0.95

The model and the tokenizer are those that the checkpoint was trained with, in whatever layout; if the tokenizer's files
have moved, --vocab-file, --merge-file or --tokenizer-model say where to. The same --seed gives the same text.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.checkpoint import open_checkpoint
from megatron.core.config import ConfigError, FlagParser, add_flags, build, knob
from megatron.core.device import Device
from megatron.core.inference import SamplingConfig, chooser, load_gpt
from megatron.core.inference.generate import generate
from megatron.core.random import seed_of
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from megatron.training.config import COMPONENTS, Config
from tools.preprocess_data import parse

_UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character


@dataclass(frozen=True)
class GenerateConfig:
    """Generation."""

    prompt: list[str] = field(default_factory=list)
    load: str | None = knob(None, "folder of checkpoints")
    iteration: int | None = knob(None, "which of them; the latest when unset")
    prompt_file: str | None = knob(None, "file whose whole text is one more prompt")
    max_new_tokens: int = knob(64, "tokens to add, unless the end of the document comes first")
    num_samples: int = knob(1, "texts for each prompt")
    seed: int = knob(1234, "of the draws")
    device: Literal["auto", "cpu"] = knob("auto", "where to compute; auto takes an accelerator if any")

    def __post_init__(self) -> None:
        problems = [] if self.load else ["--load is needed: a folder that pretraining wrote with --save"]
        if not self.prompt and not self.prompt_file:
            problems.append("no prompt: give --prompt TEXT or --prompt-file FILE")
        problems += [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
            for name in ("max_new_tokens", "num_samples")
            if getattr(self, name) < 1
        ]
        if self.iteration is not None and self.iteration < 0:
            problems.append(f"--iteration is {self.iteration}; it must not be negative")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Writer:
    """All that it takes to continue a prompt."""

    model: nn.Module
    tokenizer: Tokenizer
    max_length: int  # tokens that the model sees at once


def load_writer(settings: GenerateConfig, tokenizer_flags: dict[str, Any]) -> Writer:
    """Model and tokenizer of the checkpoint; `tokenizer_flags` replace its own tokenizer settings."""
    checkpoint = open_checkpoint(settings.load, settings.iteration)
    vocab_size, config = read_state(checkpoint.state, str(checkpoint.folder))
    tokenizer = load_tokenizer(replace(config.tokenizer, **tokenizer_flags))
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            f"the checkpoint has a vocabulary of {vocab_size}, the tokenizer ({tokenizer.name}) one of "
            f"{tokenizer.vocab_size}; give the tokenizer that it was trained with: --tokenizer-type and its files"
        )
    device = Device.select(settings.device).torch_device
    model = load_gpt(checkpoint, config.transformer, vocab_size=vocab_size, positions=config.positions, device=device)
    print(f"iteration {checkpoint.iteration} of {settings.load} on {device.type}", file=sys.stderr, flush=True)
    return Writer(model, tokenizer, config.data.seq_length)


def read_state(state: dict[str, Any], source: str) -> tuple[int, Config]:
    """(vocabulary size, settings) of the run that saved `state`. Settings that it lacks take their defaults."""
    saved = state.get("config", {})
    missing = [name for name in ("transformer", "data", "tokenizer") if name not in saved]
    if missing or "vocab_size" not in state:
        raise ConfigError(f"{source} does not say what model it holds; it was not written by a pretraining run of ours")
    known = {f.name for f in fields(COMPONENTS["transformer"])}
    if unknown := sorted(saved["transformer"].keys() - known):
        raise ConfigError(f"{source} has model settings unknown here: {', '.join(unknown)}; use the code that wrote it")
    parts = {name: build(component, saved.get(name, {})) for name, component in COMPONENTS.items()}
    return state["vocab_size"], Config(**parts)


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    try:
        return build_tokenizer(config)
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; if it has moved since the training, say with this flag where to") from None


def read_prompts(settings: GenerateConfig) -> list[str]:
    """The prompts of the command line, then that of the file, without the newline at its end."""
    prompts = list(settings.prompt)
    if settings.prompt_file is not None:
        try:
            prompts.append(Path(settings.prompt_file).read_text(encoding="utf-8").removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file {settings.prompt_file} is not UTF-8 at byte {error.start}") from None
    return prompts


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt. An empty one is the end of the document before it, after which a new text begins."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt {prompt!a:.60} is not valid text at character {error.start}") from None
    try:
        return tokenizer.tokenize(prompt) or [tokenizer.eod]
    except ValueError as error:
        raise ConfigError(f"the prompt {prompt!r:.60} cannot be read: {error}") from None


def text_pieces(tokenizer: Tokenizer, before: list[int], new_ids: Iterable[int]) -> Iterator[str]:
    """The text that `new_ids` add behind the ids `before`, piece by piece.

    A piece ends where a character does: one may take several ids. The text of an id may depend on those before it.
    """
    ids = list(before)
    text = tokenizer.detokenize(ids)
    shown = len(text)
    for new in new_ids:
        ids.append(new)
        text = tokenizer.detokenize(ids)
        if not text.endswith(_UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


def write_texts(settings: GenerateConfig, sampling: SamplingConfig, writer: Writer) -> None:
    """Every sample of every prompt to stdout; with more than one text, a line above each says which it is."""
    prompts = read_prompts(settings)
    encoded = [prompt_ids(prompt, writer.tokenizer) for prompt in prompts]  # all, before the first text is begun
    for i, (prompt, ids) in enumerate(zip(prompts, encoded)):
        for j in range(settings.num_samples):
            if len(prompts) * settings.num_samples > 1:
                print(f"=== prompt {i + 1}, sample {j + 1}")
            # A generator for each text: it stays the same when more are asked for, or when another one stops earlier.
            generator = torch.Generator().manual_seed(seed_of(settings.seed, "generate", i, j))
            new_ids = generate(
                writer.model, ids,
                max_new_tokens=settings.max_new_tokens, max_length=writer.max_length,
                stop_id=writer.tokenizer.eod, choose=chooser(sampling, generator),
            )  # fmt: skip
            print(prompt, end="", flush=True)
            for piece in text_pieces(writer.tokenizer, ids, new_ids):
                print(piece, end="", flush=True)
            print(flush=True)


def make_parser() -> FlagParser:
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, GenerateConfig)
    parser.add_argument(
        "--prompt",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="text to continue; may be given again; an empty one begins a new document",
    )
    add_flags(parser, SamplingConfig)
    add_flags(parser, TokenizerConfig)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 anything that the user can mend, said in one line on stderr."""
    try:
        given = parse(make_parser(), arguments)
        settings, sampling = build(GenerateConfig, given), build(SamplingConfig, given)
        if sampling.greedy and settings.num_samples > 1:
            raise ConfigError(f"--greedy would give {settings.num_samples} equal texts; leave out --num-samples")
        names = {f.name for f in fields(TokenizerConfig)}
        writer = load_writer(settings, {name: value for name, value in given.items() if name in names})
        write_texts(settings, sampling, writer)
    except BrokenPipeError:  # the reader of stdout has seen enough; leave nothing to flush into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"generate: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
