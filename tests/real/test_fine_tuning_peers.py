"""Fine-tuning against transformers and peft on the same weights and examples: losses, adapters both ways, chat templates.

Skipped without those packages: python -m pytest tests/real/test_fine_tuning_peers.py in an environment that has them.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from sft_folder import CHATML, CHATML_BLOCKS, chats, read_safetensors, write_lines, write_model
from whole_run import run

import finetune_gpt
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.sft_dataset import build_sft_datasets
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.chat_template import ChatTemplate, ChatTemplateError
from tools import lora as lora_tool

sys.path.append(str(Path(__file__).parent))
from published_tokenizers import artefacts

transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, RATE = 10, 4, 96, 1e-3
FLAGS = (
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {STEPS} --lr {RATE} "
    "--lr-decay-style constant --weight-decay 0 --log-interval 1 --split 1,0,0 --device cpu"
)


def our_losses(folder: Path, data: Path, capsys, more: str = "") -> list[float]:
    words = f"{FLAGS} --pretrained-checkpoint {folder} --data-path {data} {more}".split()
    capsys.readouterr()
    defaults = finetune_gpt.defaults_of(words)
    run(words, script=finetune_gpt, tiny=[], args_defaults=defaults, extra_args_provider=finetune_gpt.add_own_flags)
    return [float(x) for x in re.findall(r"lm loss: (\S+)", capsys.readouterr().out)]


def their_losses(model: torch.nn.Module, folder: Path, data: Path) -> list[float]:
    """Each example alone, in the order and number in which ours packs them."""
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    config = DataConfig(
        data_path=[str(data)],
        split="1,0,0",
        seq_length=LENGTH,
        sft=True,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    train, _, _ = build_sft_datasets(config, tokenizer, [STEPS * BATCH, 0, 0], 1234, say=lambda line: None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    model.train()
    losses = []
    for step in range(STEPS):
        total, count = 0.0, 0.0
        for i in range(step * BATCH, (step + 1) * BATCH):
            item = {name: torch.from_numpy(x) for name, x in train[i].items()}
            for document in item["document_ids"][item["loss_mask"] > 0].unique():  # without padding
                own = item["document_ids"] == document
                logits = model(item["tokens"][own][None]).logits[0]
                each = torch.nn.functional.cross_entropy(logits, item["labels"][own], reduction="none")
                total = total + (each * item["loss_mask"][own]).sum()
                count += float(item["loss_mask"][own].sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_of_all_weights_are_those_of_transformers(kind: str, tmp_path: Path, capsys):
    folder, data = write_model(tmp_path / "base", kind), write_lines(tmp_path / "chats.jsonl", chats(30))
    ours = our_losses(folder, data, capsys)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = their_losses(model, folder, data)
    assert len(ours) == STEPS and ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_and_adapters_are_those_of_peft(kind: str, tmp_path: Path, capsys):
    peft = pytest.importorskip("peft")
    folder, data = write_model(tmp_path / "base", kind), write_lines(tmp_path / "chats.jsonl", chats(30))
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, use_rslora=True)
    settings.fan_in_fan_out = kind == "gpt2"
    settings.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "theirs")

    # theirs, trained by both
    ours = our_losses(folder, data, capsys, f"--lora-adapter {tmp_path}/theirs --save {tmp_path}/ours")
    theirs = their_losses(model, folder, data)
    assert ours == pytest.approx(theirs, abs=1e-4) and ours[-1] < ours[0]
    assert lora_tool.main(["--load", f"{tmp_path}/ours", "--save-peft", f"{tmp_path}/exported"]) == 0
    model.save_pretrained(tmp_path / "trained")
    exported, trained = (
        read_safetensors(tmp_path / name / "adapter_model.safetensors") for name in ("exported", "trained")
    )
    assert exported.keys() == trained.keys()
    assert all(abs(exported[name] - trained[name]).max() < 1e-3 for name in trained)

    # PEFT loads ours, with the logits of the merged folder
    assert lora_tool.main(["--load", f"{tmp_path}/ours", "--base", str(folder), "--merge", f"{tmp_path}/merged"]) == 0
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(fresh, tmp_path / "exported").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ids = torch.arange(40)[None] * 6
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)

    # theirs -> ours -> theirs keeps every bit
    our_losses(
        folder, data, capsys, f"--lora-adapter {tmp_path}/theirs --save {tmp_path}/kept --lr 1e-30 --train-iters 1"
    )
    assert lora_tool.main(["--load", f"{tmp_path}/kept", "--save-peft", f"{tmp_path}/again"]) == 0
    before, after = (read_safetensors(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "again"))
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


# ---------------------------------------------------------------- chat templates

TURNS = [
    [{"role": "user", "content": "Hi <b>&'\"</b> ü 日本"}, {"role": "assistant", "content": "Hello.\n\n  Two lines  "}],
    [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2?"},
        {"role": "assistant", "content": "4"},
    ],
    [{"role": "user", "content": "only a question"}],
    [{"role": "assistant", "content": "begins"}, {"role": "user", "content": "x"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d <é>", "parameters": {"type": "object", "properties": {}}},
    }
]
WRITTEN = {
    "chatml": CHATML,
    "blocks": CHATML_BLOCKS,
    "namespace and loops": "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- if loop.first %}{% continue %}{% endif %}"
    "{%- set ns.n = ns.n + 1 %}{{ ns.n }}{{ m['content'] | trim }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "macros": "{% macro show(m, sep='|') %}{{ m.role | upper }}{{ sep }}{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{{ show(m, sep='/') }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 1, 'a': [1.5, none, true]} | tojson(sort_keys=true) }}",
    "raises": "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}ok",
    "slices and tests": "{% for m in messages[1:] if m.content is string and m.content is not none %}"
    "{{ m.content.split(' ')[-1] }}{{ loop.index0 }}{{ m.get('x', 'none') }}{% endfor %}{{ messages | length }}",
    "white space": "\n  {% for m in messages %}\n    {{ m.content }}\n  {% endfor %}\n  end\n",
    "set block": "{% set text %}{% for m in messages %}{{ m.content }},{% endfor %}{% endset %}{{ text | replace(',', ';') }}",
    "named tokens": "{{ eos_token }}{{ bos_token }}{{ pad_token }}{{ messages[0].content | default('') | title }}",
    "selectattr": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('~') }}"
    "{{ '%s-%d' | format('a', 3) }}{{ dict(a=1).items() | list }}{{ messages | map('length') | list }}",
}


def compare(mine: ChatTemplate, tokenizer, template: str | None) -> int:
    """The number of renderings that were compared."""
    compared = 0
    for turns in TURNS:
        for prompt in (False, True):
            for tools in (None, TOOLS):
                options = {"add_generation_prompt": prompt, "tools": tools}
                try:
                    expected = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
                except Exception:
                    with pytest.raises(ChatTemplateError):
                        mine.render(turns, **options)
                    continue
                got = mine.render(turns, **options)
                if "strftime" not in mine.source or "day" not in mine.source.lower():
                    assert got == expected
                compared += 1
    return compared


def test_written_templates_render_as_transformers_renders(tmp_path: Path):
    folder = write_model(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, template in WRITTEN.items():
        (tmp_path / "template").write_text(template)
        with ChatTemplate.of_tokenizer(str(folder / "tokenizer.json"), str(tmp_path / "template")) as mine:
            assert compare(mine, tokenizer, template) > 0, name


def test_masks_of_generation_blocks_are_those_of_transformers(tmp_path: Path):
    folder = write_model(tmp_path / "m", template=CHATML_BLOCKS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = importlib.import_module("megatron.core.datasets.sft_dataset").make_encoder(
        DataConfig(), build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    )
    for turns in TURNS[:2]:
        theirs = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        (ours,) = encoder.encode({"messages": turns})
        assert ours.tokens.tolist() == list(theirs["input_ids"])
        assert ours.is_trained.tolist() == list(theirs["assistant_masks"])
    encoder.template.close()


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "llama2", "qwen3", "gemma3", "gptoss", "deepseek_v3"])
def test_templates_of_published_tokenizers_render_as_transformers_renders(name: str):
    folder = artefacts() / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{folder} is not there; bash tests/real.sh fetches it")
    template = ChatTemplate.of_tokenizer(str(folder / "tokenizer.json"))
    if template is None:
        pytest.skip(
            f"{json.loads((folder / 'tokenizer_config.json').read_text()).get('tokenizer_class')}: without a template"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with template as mine:
        assert compare(mine, tokenizer, None) > 0
