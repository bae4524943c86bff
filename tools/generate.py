"""Generate text with a trained model: prompt and continuation are streamed to stdout.

    python tools/generate.py --load checkpoints --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    torchrun --nproc-per-node 4 tools/generate.py --load checkpoints --prompt "Once upon a time" --greedy \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Model and tokenizer are the checkpoint's, from any layout; if the tokenizer's files have moved, give --vocab-file, --merge-file or
--tokenizer-model. The same --seed gives the same text in every layout. Only the first rank reads prompts and tokenizer files, and
prints. --model mine/pretrain.py brings the tokenizers and attention kernels that a script of yours adds.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.convert import open_any
from megatron.convert.hf_origin import Provenance
from megatron.convert.hf_tokenizer_vocab import read_vocabulary
from megatron.core import parallel_state
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
from megatron.core.base.error_reporting import is_user_error, write_error_file
from megatron.core.base.output_streams import READER_ENDED, answers_failed, until_reader_ends
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.inference import (
    SamplingConfig,
    chooser,
    layout_problems,
    load_gpt,
    load_t5,
    notes_on,
    read_saved_settings,
)
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.generate_t5 import answer_batch
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device, DeviceName
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.sharding.initial_values import seed_of
from megatron.core.storage.paths import path_of
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_fingerprint import tokenizer_sha256
from megatron.core.tokenizers.vocabulary_diff import token_difference, vocabulary_of
from megatron.core.transformer.context_parallel_rules import context_parallel_problems
from megatron.training.initialize import available_cores
from megatron.training.monitor.cpu_contention import Contention
from tools.errors import naming_flag
from tools.generating.t5 import is_t5, reading_of, t5_problems
from tools.generating.writer import Writer
from tools.script import script_at

SIZES = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
OF_LAYOUT = (*SIZES, "cp_comm_type", "hierarchical_context_parallel_sizes")


@dataclass(frozen=True)
class GenerateConfig(FlagConfig):
    """Generation."""

    prompt: list[str] = field(default_factory=list)
    load: str | None = option(None, "checkpoint folder", metavar="DIR", required=True)
    model: str | None = option(
        None,
        "script that trained, if it adds a tokenizer or an attention kernel; it runs up to pretrain()",
        metavar="FILE",
    )
    iteration: WholeNumber | None = option(
        None, "iteration to load; default: the latest", flags=("--iteration", "--ckpt-step")
    )
    prompt_file: str | None = option(None, "file with one prompt; -: standard input", metavar="FILE")
    sample_input_file: str | None = option(None, "file with a prompt per line; -: standard input", metavar="FILE")
    max_new_tokens: Count = option(
        64, "tokens to generate, unless the document ends first", flags=("--max-new-tokens", "--out-seq-length")
    )
    num_samples: Count = option(1, "texts per prompt")
    batch_size: Count = option(1, "texts generated at once; results differ from one at a time only by rounding")
    genfile: str | None = option(None, "JSONL file for the texts instead of standard output", metavar="FILE")
    seed: Annotated[int, "[0, 2^32)"] = option(1234, "sampling seed")
    recompute: bool = option(False, "no key/value cache: recompute all tokens for each new one")
    decoder_start_token_id: WholeNumber | None = option(
        None, "T5: id that begins the decoder's text; default: the tokenizer's, or that of a Hugging Face folder"
    )
    tensor_model_parallel_size: Count = option(1, "tensor-parallel ranks")
    pipeline_model_parallel_size: Count = option(1, "pipeline-parallel ranks")
    context_parallel_size: Count = option(1, "context-parallel ranks: shards of each prompt")
    cp_comm_type: list[str] = option(
        ["p2p"], "how context-parallel ranks see each other's tokens, as in training", metavar="TYPE"
    )
    hierarchical_context_parallel_sizes: list[int] | None = option(None, "as in training, for --cp-comm-type a2a+p2p")
    device: DeviceName = option("auto", "device to run on; auto: an accelerator if there is one")
    distributed_timeout_minutes: Count = option(10, "minutes until an unfinished collective is an error")
    local_rank: int | None = option(
        None, "rank on this node, as launchers pass it", flags=("--local-rank", "--local_rank")
    )

    def problems(self) -> Iterator[str]:
        if not self.load:
            yield "--load is needed: a folder that pretraining wrote with --save"
        if not self.prompt and not self.prompt_file and not self.sample_input_file:
            yield "no prompt: give --prompt TEXT or --prompt-file FILE"
        if self.prompt_file == self.sample_input_file == "-":
            yield "--prompt-file and --sample-input-file cannot both be standard input; give one a name"


@dataclass(frozen=True)
class Settings:
    """The command line."""

    generation: GenerateConfig
    sampling: SamplingConfig
    tokenizer_flags: dict[str, Any]  # override the checkpoint's tokenizer settings
    device: Device


def read_settings(arguments: list[str] | None) -> Settings:
    """The command line, checked on this rank alone. Raises ConfigError with the problems."""
    given = read_flags(make_parser(), arguments)
    settings, sampling = build(GenerateConfig, given), build(SamplingConfig, given)
    if settings.model is not None:
        script_at(settings.model)
    if sampling.greedy and settings.num_samples > 1:
        raise ConfigError(f"--greedy gives {settings.num_samples} equal texts; leave out --num-samples")
    layout = prod(getattr(settings, name) for name in SIZES)
    if layout != (ranks := parallel_state.launched_world_size()):
        shared = settings.context_parallel_size
        raise ConfigError(
            f"{ranks} process(es) for --tensor-model-parallel-size {settings.tensor_model_parallel_size} x "
            f"--pipeline-model-parallel-size {settings.pipeline_model_parallel_size}"
            f"{f' x --context-parallel-size {shared}' if shared > 1 else ''}; start {layout}"
        )
    names = {f.name for f in fields(TokenizerConfig)}
    local_rank = parallel_state.launched_local_rank() if settings.local_rank is None else settings.local_rank
    device = Device.select(settings.device, local_rank)
    return Settings(settings, sampling, {name: value for name, value in given.items() if name in names}, device)


def make_parser() -> FlagParser:
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, GenerateConfig)
    said = "text to continue; may be given again; an empty one begins a new document"
    parser.add_argument("--prompt", action="append", default=argparse.SUPPRESS, metavar="TEXT", help=said)
    add_flags(parser, SamplingConfig)
    add_flags(parser, TokenizerConfig)
    return parser


# ---------------------------------------------------------------- the model


def load_model(settings: GenerateConfig, checkpoint: Checkpoint, device: Device) -> tuple[nn.Module, Mesh]:
    """This rank's stage of the checkpoint's model, and the mesh of its ranks. Every rank must call."""
    saved = read_saved_settings(checkpoint.state, str(checkpoint.folder))
    sizes = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    parallel = build(
        ParallelConfig, {f.name: getattr(settings, f.name) for f in fields(ParallelConfig) if f.name in OF_LAYOUT}
    )
    problems = layout_problems(saved.transformer, *sizes)
    problems += t5_problems(checkpoint.state, saved, settings.max_new_tokens, settings.context_parallel_size)
    if problems := [*problems, *context_parallel_problems(parallel, saved.transformer, {})]:
        raise ConfigError(problems)
    mesh = parallel_state.initialize_model_parallel(
        *sizes,
        context_parallel_size=settings.context_parallel_size,
        hierarchical_context_parallel_sizes=settings.hierarchical_context_parallel_sizes,
        ranks_per_kv_head=saved.transformer.ranks_per_kv_head(sizes[0]),
        distributed_timeout_minutes=settings.distributed_timeout_minutes,
    )
    sizes = {"vocab_size": saved.vocab_size, "positions": saved.positions}
    of_context = {"cp_types": tuple(settings.cp_comm_type)}
    load = load_t5 if is_t5(checkpoint.state) else load_gpt
    return load(checkpoint, saved.transformer, **sizes, device=device.torch_device, mesh=mesh, **of_context), mesh


# ---------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Prompts:
    """The prompts: read by the first rank, broadcast to all."""

    texts: list[str]
    ids: list[list[int]]
    stop_id: int | list[int] | None  # None: no text ends by itself
    max_length: int | None  # the model's sequence length; None: there is no longest
    start_id: int | None = None  # of a T5: what the decoder's text begins with

    @classmethod
    def read(cls, settings: Settings, state: dict[str, Any], source: str) -> tuple["Prompts", Tokenizer]:
        """The prompts and their tokenizer. Raises ValueError, OSError or ImportError."""
        saved = read_saved_settings(state, source)
        given = replace(saved.tokenizer, **settings.tokenizer_flags)
        for flag, reason in given.without_effect.items():
            if flag[2:].replace("-", "_") in settings.tokenizer_flags:
                print(f"no effect here: {flag}: {reason}", file=sys.stderr, flush=True)
        try:
            tokenizer = build_tokenizer(given)
        except FileNotFoundError as error:
            raise ConfigError(f"{error}; if it has moved since the training, give its new place by this flag") from None
        if (given.model_vocab_size or tokenizer.vocab_size) != saved.vocab_size:
            raise ConfigError(
                f"the checkpoint has a vocabulary of {saved.vocab_size}, the tokenizer ({tokenizer.name}) one of "
                f"{tokenizer.vocab_size}; give the checkpoint's tokenizer: --tokenizer-type and its files"
            )
        if state.get("tokenizer_sha256") not in (None, tokenizer_sha256(given, tokenizer)):
            raise ConfigError(
                f"the tokenizer ({tokenizer.name}) has the size of the checkpoint's tokenizer, but its files differ; give the "
                "checkpoint's: --tokenizer-type and its files"
            )
        check_tokens_of_folder(state, source, tokenizer)
        texts = read_texts(settings.generation)
        how = reading_of(state, saved, tokenizer, settings.generation.decoder_start_token_id)
        ids = [how.ids_of(text, tokenizer, prompt_ids) for text in texts]
        for text, found in zip(texts, ids):
            how.check(text, found)
        return cls(texts, ids, how.stop_id, how.longest, how.start_id), tokenizer

    def told(self, world: Axis, device: torch.device) -> "Prompts":
        """The first rank's prompts, on every rank. Every rank must call."""
        return Prompts(**json.loads(collectives.broadcast_text(json.dumps(vars(self)), world, device)))


def check_tokens_of_folder(state: dict[str, Any], source: str, tokenizer: Tokenizer) -> None:
    """Refuse another tokenizer than that of the folder that a model lies in. Raises ConfigError."""
    origin, mine = Provenance.in_state(state, source), vocabulary_of(tokenizer)
    if origin is None or mine is None or state.get("tokenizer_sha256") is not None:
        return
    try:
        theirs = read_vocabulary(path_of(origin.folder))
    except (ValueError, OSError, ImportError):  # what cannot be read is not compared
        return
    if theirs is not None and (differing := token_difference(theirs, mine)):
        raise ConfigError(
            f"{source} holds a model of another tokenizer than {tokenizer.name}: {differing}; leave the flags of the tokenizer "
            "out to take the folder's"
        )


def read_texts(settings: GenerateConfig) -> list[str]:
    """The --prompt texts, then --prompt-file without its final newline, then the non-empty lines of --sample-input-file."""
    texts = list(settings.prompt)
    if path := settings.prompt_file:
        texts.append(read_file("--prompt-file", path, "to begin a new document: --prompt ''").removesuffix("\n"))
    if path := settings.sample_input_file:
        lines = read_file("--sample-input-file", path, "give a file with a prompt in each line").splitlines()
        texts += filter(str.strip, lines)
    return texts


def read_file(flag: str, path: str, advice: str) -> str:
    """The text of a file, or of standard input for `-`. advice: for the error if there is no text."""
    try:
        with naming_flag(flag, path, "give a file of text, or - for standard input"):
            text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise ConfigError(f"{flag} {path} holds no text, so no prompt; {advice}")
    return text


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt. An empty prompt becomes the end-of-document token, after which a new text begins."""
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
    """Generate and write every sample of every prompt, in order; returns the number of new tokens. Every rank must call."""
    generation, total = settings.generation, 0
    jobs = [(i, j) for i in range(len(prompts.ids)) for j in range(generation.num_samples)]
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
        }
        texts = [prompts.ids[i] for i, _ in batch]
        if prompts.start_id is None:
            steps = generate_batch(model, texts, max_length=prompts.max_length, **options)
        else:
            steps = answer_batch(model, texts, start_id=prompts.start_id, **options)
        if len(batch) > 1:  # texts of a batch are printed one after the other, not interleaved
            steps = list(steps)
        for row, (i, j) in enumerate(batch):
            new_ids = (step[row] for step in steps if step[row] is not None)
            ids = prompts.ids[i] if prompts.start_id is None else None
            total += writer.write((i, j), prompts.texts[i], ids, new_ids, generation.max_new_tokens)
    return total


def run(settings: Settings, world: Axis) -> None:
    """Load, generate, report. Every rank of `world` must call; an error on one rank stops all."""
    generation, device = settings.generation, settings.device
    checkpoint = open_any(generation.load, generation.iteration, world, device.torch_device)
    say = partial(print, file=sys.stderr, flush=True) if world.is_first else lambda _: None
    if checkpoint.warning:
        say(f"WARNING: {checkpoint.warning}")
    prompts = Prompts([], [], 0, 0)
    tokenizer = genfile = None
    with collectives.raise_together(world, device.torch_device):
        if world.is_first:
            prompts, tokenizer = Prompts.read(settings, checkpoint.state, str(checkpoint.folder))
            if path := generation.genfile:
                with naming_flag("--genfile", path, "choose a file that can be written, in a folder that exists"):
                    genfile = open(path, "w", encoding="utf-8")  # noqa: SIM115  written until the process ends
    prompts = prompts.told(world, device.torch_device)
    model, mesh = load_model(generation, checkpoint, device)
    for note in notes_on(checkpoint.state):
        say(note)
    say(f"iteration {checkpoint.iteration} of {generation.load} on {device.name}")
    writer = Writer(tokenizer, genfile, numbered=len(prompts.ids) * generation.num_samples > 1)
    start, ranks = time.perf_counter(), parallel_state.launched().local_size
    contention = Contention(ranks, available_cores()[0], torch.get_num_threads())
    count = write_texts(settings, prompts, model, mesh, writer)
    seconds = time.perf_counter() - start
    if note := contention.note_if_due():
        say(note)
    say(f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s")


def main(arguments: list[str] | None = None) -> int:
    """Run the tool. Status: 0 success, 2 an error in the flags, 1 another error of the user; one rank prints it, in a line."""
    settings, problem = None, None
    try:
        settings = read_settings(arguments)
    except ConfigError as error:
        problem = error
    try:
        timeout = settings.generation.distributed_timeout_minutes if settings else 10
        if parallel_state.launched_world_size() > 1:
            device = settings.device if settings else Device.select(local_rank=parallel_state.launched_local_rank())
            parallel_state.start_distributed(device.backend, timeout)
        with collectives.raise_together(parallel_state.agreement_axis()):
            if problem is not None:
                raise problem
        run(settings, parallel_state.world_axis())
    except BrokenPipeError:
        if not answers_failed():
            raise
        return READER_ENDED
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError, ImportError, collectives.PeerError) as error:
        if isinstance(error, ValueError) and not is_user_error(error):
            raise
        said = str(error)
        if isinstance(error, OSError) and answers_failed():
            said = f"standard output cannot be written: {error.strerror}"
        told = f"generate: {'; '.join(line.strip() for line in said.splitlines())}"
        write_error_file(told)
        if parallel_state.launched_rank() == 0:
            print(told, file=sys.stderr)
        return 1 if settings else 2
    finally:
        parallel_state.stop_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
