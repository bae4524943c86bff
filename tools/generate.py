"""Generate text with a trained model: prompt and continuation are streamed to stdout.

    python tools/generate.py --load checkpoints --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    torchrun --nproc-per-node 4 tools/generate.py --load checkpoints --prompt "Once upon a time" --greedy \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Model and tokenizer are the checkpoint's, saved from any layout; if the tokenizer's files have moved, give --vocab-file,
--merge-file or --tokenizer-model. The same --seed gives the same text in every layout. Only the first rank reads prompts and
tokenizer files, and prints. --model mine/pretrain.py builds the model with that script's model_provider, and adds what the
script registers: tokenizers, attention kernels, caches.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    FlagParser,
    WholeNumber,
    add_flags,
    build,
    option,
    read_flags,
)
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from tools.errors import answer_help, naming_flag
from tools.trained_model.flags import TrainedModelConfig


@dataclass(frozen=True)
class GenerateConfig(FlagConfig):
    """Generation."""

    prompt: list[str] = field(default_factory=list)
    prompt_file: str | None = option(None, "file with one prompt; -: standard input", metavar="FILE")
    sample_input_file: str | None = option(None, "file with a prompt per line; -: standard input", metavar="FILE")
    max_new_tokens: Count = option(
        64, "tokens to generate, unless the document ends first", flags=("--max-new-tokens", "--out-seq-length")
    )
    num_samples: Count = option(1, "number of texts to generate per prompt")
    batch_size: Count = option(1, "number of texts generated at once; it changes results only by rounding")
    genfile: str | None = option(None, "JSONL file for the texts instead of standard output", metavar="FILE")
    seed: Annotated[int, "[0, 2^32)"] = option(1234, "sampling seed")
    recompute: bool = option(False, "without a key/value cache: recompute all tokens for each new token")
    kv_cache: str = option(
        "contiguous", "the key/value cache: a name in CACHES, to which the script of --model may add", metavar="NAME"
    )
    decoder_start_token_id: WholeNumber | None = option(
        None,
        "T5: id of the token that begins the decoder's text; default: that of the tokenizer, or of a Hugging "
        "Face folder",
    )

    def problems(self) -> Iterator[str]:
        if not self.prompt and not self.prompt_file and not self.sample_input_file:
            yield "no prompt: give --prompt TEXT, --prompt-file FILE, or --prompt-file - for standard input"
        if self.prompt_file == self.sample_input_file == "-":
            yield "--prompt-file and --sample-input-file cannot both be standard input; give one a name"


def make_parser() -> FlagParser:
    """Return the parser of all flags of this tool."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, GenerateConfig)
    add_flags(parser, TrainedModelConfig)
    prompt_help = "text to continue; may be given again; an empty one begins a new document"
    parser.add_argument("--prompt", action="append", default=argparse.SUPPRESS, metavar="TEXT", help=prompt_help)
    add_flags(parser, SamplingConfig)
    add_flags(parser, TokenizerConfig)
    return parser


if __name__ == "__main__":
    answer_help(make_parser)

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.inference import chooser
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.generate_t5 import answer_batch
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.initial_values import seed_of
from megatron.core.tokenizers import Tokenizer
from megatron.training.initialize import affinity_cores
from megatron.training.monitor.cpu_contention import CpuContention
from tools.generating.t5 import prompt_rules_of, t5_problems
from tools.generating.writer import Writer
from tools.trained_model.load import ModelSettings, TrainedModel, read_model_settings
from tools.trained_model.run_on_ranks import run_on_ranks
from tools.waiting import waiting_for_text


@dataclass(frozen=True)
class Settings:
    """The command line."""

    generation: GenerateConfig
    sampling: SamplingConfig
    model: ModelSettings


def read_settings(arguments: list[str] | None) -> Settings:
    """Read the command line and check what this rank can check alone. Raises ConfigError with the problems."""
    values = read_flags(make_parser(), arguments)
    generation = build(GenerateConfig, values)
    sampling = build(SamplingConfig, values)
    model = read_model_settings(values)
    if sampling.greedy and generation.num_samples > 1:
        raise ConfigError(f"--greedy gives {generation.num_samples} equal texts; leave out --num-samples")

    # one process for each rank of the layout
    world_size = parallel_state.launched_world_size()
    config = model.config
    replicas = config.expert_replicas
    needed_world_size = config.replica_size * replicas
    if world_size != needed_world_size:
        cp_size = config.context_parallel_size
        context = f" x --context-parallel-size {cp_size}" if cp_size > 1 else ""
        if replicas > 1:
            context += (
                f" x {replicas} replicas, which --expert-model-parallel-size {config.expert_model_parallel_size} needs"
            )
        raise ConfigError(
            f"{world_size} process(es) for --tensor-model-parallel-size {config.tensor_model_parallel_size} x "
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size}{context}; start {needed_world_size}"
            f"{config.fewer_processes}"
        )
    return Settings(generation, sampling, model)


# ---------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Prompts:
    """The prompts, read on the first rank and broadcast to all. The fields hold only what JSON can."""

    texts: list[str]
    ids: list[list[int]]  # of each text
    stop_id: int | list[int] | None  # ids that end a text; None: only --max-new-tokens does
    max_length: int | None  # the model's sequence length; None: unlimited
    start_id: int | None = None  # T5: the first id of the decoder's text

    @classmethod
    def read(cls, settings: Settings, trained: TrainedModel) -> tuple["Prompts", Tokenizer]:
        """Read the prompts and build their tokenizer. Raises ValueError, OSError or ImportError."""
        tokenizer = trained.tokenizer()
        texts = read_texts(settings.generation)
        rules = prompt_rules_of(trained.state, trained.saved, tokenizer, settings.generation.decoder_start_token_id)
        ids = [rules.encode(text, tokenizer, prompt_ids) for text in texts]
        for text, ids_of_text in zip(texts, ids):
            rules.check_length(text, ids_of_text)
        return cls(texts, ids, rules.stop_id, rules.max_length, rules.start_id), tokenizer

    def broadcast(self, world: Axis, device: torch.device) -> "Prompts":
        """Return the first rank's prompts on every rank. Every rank must call."""
        return Prompts(**json.loads(collectives.broadcast_text(json.dumps(vars(self)), world, device)))


def read_texts(settings: GenerateConfig) -> list[str]:
    """Return the prompts: --prompt texts, --prompt-file without its final newline, lines of --sample-input-file."""
    texts = list(settings.prompt)
    if path := settings.prompt_file:
        texts.append(read_file("--prompt-file", path, "to begin a new document: --prompt ''").removesuffix("\n"))
    if path := settings.sample_input_file:
        lines = read_file("--sample-input-file", path, "give a file with a prompt in each line").splitlines()
        texts += filter(str.strip, lines)
    return texts


def read_file(flag: str, path: str, advice: str) -> str:
    """Return the text of a file, or of standard input for `-`. advice: for the error if there is no text."""
    try:
        with naming_flag(flag, path, "give a file of text, or - for standard input"), waiting_for_text(path):
            encoded = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            text = encoded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise ConfigError(f"{flag} {path} holds no text, so no prompt; {advice}")
    return text


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt; of an empty one the end-of-document token, after which a new text begins."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt {prompt!a:.60} is not valid text at character {error.start}") from None
    try:
        ids = tokenizer.tokenize(prompt)
    except ValueError as error:
        raise ConfigError(f"the prompt {prompt!r:.60} cannot be read: {error}") from None
    if not ids and tokenizer.eod is None:
        raise ConfigError(
            f"an empty prompt begins after a document's end, and {tokenizer.name} has no token for it; give a text"
        )
    return ids or [tokenizer.eod]


# ---------------------------------------------------------------- the texts


def write_texts(settings: Settings, prompts: Prompts, model: nn.Module, mesh: Mesh, writer: Writer) -> int:
    """Generate and write all samples of all prompts in order; return the number of new tokens. Every rank must call."""
    generation = settings.generation
    num_new_tokens = 0
    jobs = [(i, j) for i in range(len(prompts.ids)) for j in range(generation.num_samples)]  # (prompt, sample)
    for first in range(0, len(jobs), generation.batch_size):
        batch = jobs[first : first + generation.batch_size]
        # One generator per text: a text must not depend on --num-samples, or on when other texts end.
        generators = [torch.Generator().manual_seed(seed_of(generation.seed, "generate", i, j)) for i, j in batch]
        options = {
            "max_new_tokens": generation.max_new_tokens,
            "stop_id": prompts.stop_id,
            "choose": [chooser(settings.sampling, generator) for generator in generators],
            "mesh": mesh,
            "use_cache": not generation.recompute,
            "cache": generation.kv_cache,
        }
        batch_ids = [prompts.ids[i] for i, _ in batch]
        is_encoder_decoder = prompts.start_id is not None
        # Each step is one new id for each text of the batch, None after its end.
        if is_encoder_decoder:
            steps = answer_batch(model, batch_ids, start_id=prompts.start_id, **options)
        else:
            steps = generate_batch(model, batch_ids, max_length=prompts.max_length, **options)
        if len(batch) > 1:  # texts of a batch are printed one after the other, so the first is not streamed
            steps = list(steps)
        for row, (i, j) in enumerate(batch):
            new_ids = (step[row] for step in steps if step[row] is not None)
            ids = None if is_encoder_decoder else prompts.ids[i]
            num_new_tokens += writer.write((i, j), prompts.texts[i], ids, new_ids, generation.max_new_tokens)
    return num_new_tokens


def run(settings: Settings, world: Axis) -> None:
    """Load the model, generate, print the speed. Every rank of `world` must call; an error on one rank stops all."""
    generation = settings.generation
    device = settings.model.device

    def log(text: str) -> None:
        if world.is_first:
            print(text, file=sys.stderr, flush=True)

    trained = TrainedModel.open(settings.model, world, log)

    # The first rank reads the prompts. If it fails, all ranks leave the block with an error.
    prompts = Prompts([], [], 0, 0)
    tokenizer = genfile = None
    with collectives.raise_together(world, device.torch_device):
        if world.is_first:
            prompts, tokenizer = Prompts.read(settings, trained)
            if path := generation.genfile:
                with naming_flag("--genfile", path, "choose a file that can be written, in a folder that exists"):
                    genfile = open(path, "w", encoding="utf-8")  # noqa: SIM115  written until the process ends
    prompts = prompts.broadcast(world, device.torch_device)

    model, mesh = trained.load(
        trained.saved.transformer,
        t5_problems(
            trained.state, trained.saved, generation.max_new_tokens, settings.model.config.context_parallel_size
        ),
    )
    for note in trained.notes:
        log(note)
    log(f"iteration {trained.checkpoint.iteration} of {settings.model.config.load} on {device.name}")

    writer = Writer(tokenizer, genfile, numbered=len(prompts.ids) * generation.num_samples > 1)
    start = time.perf_counter()
    contention = CpuContention(parallel_state.launched().local_size, affinity_cores()[0], torch.get_num_threads())
    num_tokens = write_texts(settings, prompts, model, mesh, writer)
    seconds = time.perf_counter() - start
    if note := contention.note_if_due():
        log(note)
    if num_tokens == 0:
        log("every text ended at once: the first token of each ends it")
    log(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status, as `run_on_ranks` says."""
    return run_on_ranks("generate", read_settings, run, arguments)


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
