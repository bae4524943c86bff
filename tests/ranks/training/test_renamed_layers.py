"""Checkpoints of a script's own layers: the parameters had other names once."""

import re
import shutil
from dataclasses import replace
from types import ModuleType

import torch
from whole_run import run

import pretrain_gpt
from megatron.core.dist_checkpointing.manifest_format import LATEST, MANIFEST, parse_manifest, to_json
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


class Mine(TransformerLayer):
    """A script's own layer."""

    def forward(self, hidden_states, *inputs, **options):
        out, context = super().forward(hidden_states, *inputs, **options)
        return out + 0.1 * hidden_states, context


def provide(pre_process=True, post_process=True, vp_stage=None):
    args, spec = get_args(), get_gpt_layer_local_spec()
    spec.module = Mine
    ends = {"pre_process": pre_process, "post_process": post_process}
    return GPTModel(core_transformer_config_from_args(args), spec, args.padded_vocab_size, 8, **ends)


def test_a_checkpoint_from_before_names_were_megatrons_resumes(tmp_path, capsys):
    """A script's own layer was a part, `layer`, of one of ours. The rest is as if the names had always been today's."""
    script = ModuleType("script")
    vars(script).update(vars(pretrain_gpt), model_provider=provide)
    saves = f"--save {tmp_path}/saved --save-interval 2 --num-layers 2 --untie-embeddings-and-output-weights"
    run(f"--train-iters 4 {saves}", script=script)
    expected = load_whole_tensors(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "iter_0000004")
    (tmp_path / "saved" / LATEST).write_text("2")
    file = tmp_path / "saved" / "iter_0000002" / MANIFEST
    manifest = parse_manifest(file.read_text(), file)
    tensors = {re.sub(r"(layers\.\d)\.", r"\1.layer.", name): record for name, record in manifest.tensors.items()}
    assert tensors.keys() != manifest.tensors.keys()
    file.write_text(to_json(replace(manifest, tensors=tensors)))
    run(f"--train-iters 4 --load {tmp_path}/saved {saves}", script=script)
    assert "loaded checkpoint of iteration 2" in capsys.readouterr().out
    resumed = load_whole_tensors(tmp_path / "saved")
    assert resumed.keys() == expected.keys() and all(torch.equal(resumed[name], expected[name]) for name in expected)
