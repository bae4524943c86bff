"""A pretrain script in the manner of Megatron's own T5 script: its model from configs and specs, its masks of pairs.

Every layout gives the losses of one process, in float64; the model computes what ours does with the same parts.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pretrain_t5
import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from torch import Tensor, nn

from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

STACKS: list[tuple[int, bool, bool, bool, bool]] = []  # of each stage that was built: its arguments


class Mine(TransformerLayer):
    """A layer of a script's own, which computes what ours does."""


def of_mine(specs: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Every second layer is of a script's own."""
    layers = [replace(layer, module=Mine) if i % 2 else layer for i, layer in enumerate(specs.layer_specs)]
    return TransformerBlockSubmodules(layers)


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,
    add_decoder: bool = True,
    change: Callable = lambda specs: specs,
) -> T5Model:
    args = get_args()
    config, encoder_config = (core_transformer_config_from_args(args) for _ in range(2))
    config.num_layers = args.decoder_num_layers or args.num_layers
    model = T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=change(get_t5_encoder_with_local_block_spec(encoder_config.num_layers)),
        transformer_decoder_layer_spec=change(get_t5_decoder_with_local_block_spec(config.num_layers)),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
    )
    STACKS.append(
        (len(model.encoder.layers) if model.encoder else 0, pre_process, post_process, add_encoder, add_decoder)
    )
    return model


def masks_of_pairs(seen: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """True where attention is masked: of the encoder [b, 1, s, s], of the decoder, of the decoder's look [b, 1, t, s]."""
    hidden = seen[:, None, None, :] == 0
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None].expand(len(seen), -1, -1, -1)
    return hidden | hidden.transpose(2, 3), later, hidden.expand(-1, -1, length, -1)


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple:
    batch = pretrain_t5.get_batch(data_iterator)
    masks = masks_of_pairs(batch["enc_mask"], batch["text_dec"].shape[1])
    output = model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"])
    return output, partial(pretrain_t5.loss_func, batch["loss_mask"])


SCRIPT = SimpleNamespace(
    train_valid_test_datasets_provider=pretrain_t5.train_valid_test_datasets_provider,
    model_provider=model_provider,
    forward_step=forward_step,
    args_defaults={"decoder_num_layers": 0},  # as pretrain(ModelType.encoder_and_decoder) has it
)
MODEL = (
    "--num-layers 4 --decoder-num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --decoder-seq-length 10 --fp64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --make-vocab-size-divisible-by 8 --device cpu "
    "--clip-grad 0.5 --num-workers 0 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
)
TP, SPLIT = (
    "--tensor-model-parallel-size 2 ",
    "--pipeline-model-parallel-size 3 --pipeline-model-parallel-split-rank 2 ",
)
RELATIVE = "--position-embedding-type relative --untie-embeddings-and-output-weights "


def train(mesh: Mesh, flags: str, script: SimpleNamespace = SCRIPT) -> list[dict[str, float]]:
    """The losses of each step."""
    with trainer_of(script, mesh, MODEL + flags, predicts=False) as trainer:
        steps: list[dict[str, float]] = []
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        trainer._train()
        return steps


@cache
def one_process(flags: str) -> list[dict[str, float]]:
    return run_ranks({}, partial(train, flags=flags))[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "sizes", "layout"),
    [
        ("", {"pp": 3}, SPLIT),
        pytest.param(RELATIVE, {"pp": 3, "tp": 2}, SPLIT + TP + "--sequence-parallel ", marks=pytest.mark.full),
        pytest.param(
            "", {"pp": 2, "dp": 2}, "--pipeline-model-parallel-size 2 --zero-stage 1 ", marks=pytest.mark.full
        ),
    ],
)
def test_a_split_pipeline_trains_as_one_process(flags: str, sizes: dict, layout: str):
    expected = one_process(flags)
    STACKS.clear()
    for got, losses in zip(run_ranks(sizes, partial(train, flags=flags + layout))[-1], expected, strict=True):
        assert got == pytest.approx(losses, rel=1e-10)
    if "split" in layout:  # (encoder's layers, first, last, add_encoder, add_decoder) of each stage
        stages = {(2, True, False, True, False), (2, False, False, True, False), (0, False, True, False, True)}
        assert set(STACKS) == stages


@pytest.mark.full
def test_the_script_trains_through_pretrain(capsys: pytest.CaptureFixture):
    """As a fork calls it: with the model's type, and no word of ours."""
    pretrain(
        pretrain_t5.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        argv=[*shlex.split(MODEL), "--log-interval", "1"],
    )
    found = [float(loss) for loss in re.findall(r"lm loss: (\S+)", capsys.readouterr().out)]
    assert found == pytest.approx([losses["lm loss"] for losses in one_process("")], rel=1e-6)


def test_untied_it_computes_what_our_model_does():
    """Relative positions, LayerNorm and biases, as Megatron's T5 has them: the losses of pretrain_t5.py with the same flags."""
    ours = SimpleNamespace(**vars(pretrain_t5), args_defaults={"decoder_num_layers": 0})
    (expected,) = run_ranks({}, partial(train, flags=RELATIVE, script=ours))
    for got, losses in zip(one_process(RELATIVE), expected, strict=True):
        assert got == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("flags", "sizes", "layout"),
    [
        (RELATIVE, {}, ""),
        pytest.param("", {"pp": 2, "tp": 2}, f"--pipeline-model-parallel-size 2 {TP}", marks=pytest.mark.full),
    ],
)
def test_layers_of_a_scripts_own_train_as_ours(flags: str, sizes: dict, layout: str):
    """Dropout included, in both attentions of the decoder."""

    def provider(
        pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
    ) -> T5Model:
        model = model_provider(pre_process, post_process, add_encoder, add_decoder, of_mine)
        assert any(isinstance(part, Mine) for part in model.modules())
        return model

    own = SimpleNamespace(**vars(SCRIPT) | {"model_provider": provider})
    ranks = run_ranks(sizes, partial(train, flags=flags + layout, script=own))
    for got, losses in zip(ranks[-1], one_process(flags), strict=True):
        assert got == pytest.approx(losses, rel=1e-10)


def test_what_is_not_built_is_refused_by_name():
    def build(mesh: Mesh, **changed: object) -> None:
        def provider(pre_process: bool = True, post_process: bool = True) -> T5Model:
            config = core_transformer_config_from_args(get_args())
            layers = {"encoder": 4, "decoder": 2}
            specs = get_t5_encoder_with_local_block_spec(4), get_t5_decoder_with_local_block_spec(2)
            given = {
                "transformer_encoder_layer_spec": specs[0],
                "transformer_decoder_layer_spec": specs[1],
                "num_layers": layers["decoder"],
            } | changed
            decoder = core_transformer_config_from_args(get_args())
            decoder.num_layers = given.pop("num_layers")
            return T5Model(decoder, config, vocab_size=61, max_sequence_length=16, **given)

        train(mesh, "", SimpleNamespace(**(vars(SCRIPT) | {"model_provider": provider})))

    for changed, said in (
        ({"position_embedding_type": "rope"}, "rotary"),
        ({"transformer_decoder_layer_spec": ModuleSpec(BertModel)}, "get_t5_decoder_with_local_block_spec"),
        ({"num_layers": 3}, "--decoder-num-layers"),
        ({"add_encoder": False}, "add_encoder"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run_ranks({}, partial(build, **changed))
