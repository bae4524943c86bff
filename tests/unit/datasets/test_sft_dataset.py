"""Examples for fine-tuning: forms, masks, packing, and what is said of lines that cannot be used."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sft_folder import CHATML, CHATML_BLOCKS, SPECIAL, VOCABULARY, chats, write_lines, write_tokenizer

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.encode_sft_records import SFTEncoder, UnusableRecord, marked_text
from megatron.core.datasets.sft_dataset import SFTDataset, build_sft_datasets, make_encoder, pack
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer

END = VOCABULARY - 1


def tokenizer_in(folder: Path, template: str = CHATML, **more: Any) -> Any:
    write_tokenizer(folder, template, **more)
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))


def config_of(*paths: Path, **more: Any) -> DataConfig:
    settings = {
        "seq_length": 64,
        "split": "1,0,0",
        "sft": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    return DataConfig(data_path=[str(path) for path in paths], **settings | more)


def build(
    config: DataConfig, tokenizer: Any, count: int | None = None, said: list[str] | None = None, **more: Any
) -> Any:
    say = (lambda line: None) if said is None else said.append
    return build_sft_datasets(config, tokenizer, [count, 0, 0], 7, say=say, progress=say, **more)[0]


def encoded(encoder: SFTEncoder, record: Any) -> list[str]:
    try:
        return [marked_text(example, encoder.tokenizer) for example in encoder.encode(record)]
    finally:
        if encoder.template is not None:
            encoder.template.close()


CHAT = [("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "no")]
MESSAGES = [{"role": role, "content": text} for role, text in CHAT]
TEXT = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n>>>yo<|im_end|><<<\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n>>>no<|im_end|><<<\n"
)


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS], ids=["prefixes", "blocks"])
def test_answers_with_their_end_give_loss_and_nothing_else(template: str, tmp_path: Path):
    """By blocks and by prefixes alike: the white space behind the end of a turn is not the model's to write."""
    config = DataConfig()
    assert encoded(make_encoder(config, tokenizer_in(tmp_path, template)), {"messages": MESSAGES}) == [TEXT]
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[role], "value": text} for role, text in CHAT]
    assert encoded(make_encoder(config, tokenizer_in(tmp_path, template)), {"conversations": turns}) == [TEXT]
    split = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    (last,) = encoded(make_encoder(config, tokenizer_in(tmp_path, template)), split)
    assert last == TEXT.replace(">>>yo<|im_end|><<<", "yo<|im_end|>")


def test_a_block_that_leaves_the_end_out_gets_it(tmp_path: Path):
    template = CHATML_BLOCKS.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    assert encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, template)), {"messages": MESSAGES}) == [TEXT]


def test_each_answer_may_be_an_example_of_its_own(tmp_path: Path):
    """As a template needs that drops the thinking of earlier turns."""
    thinking = CHATML.replace("+ m.content +", "+ ('hm ' if loop.last and m.role == 'assistant' else '') + m.content +")
    record = {"messages": MESSAGES}
    with pytest.raises(
        UnusableRecord, match=r"turn 2 is rendered otherwise once other turns follow.*--sft-split-turns"
    ):
        encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, thinking)), record)
    config = DataConfig(sft=True, sft_split_turns=True, reset_position_ids=True, reset_attention_mask=True)
    first, second = encoded(make_encoder(config, tokenizer_in(tmp_path, thinking)), record)
    assert first.endswith("assistant\n>>>hm yo<|im_end|><<<\n") and second.count(">>>") == 1
    assert "\nyo<|im_end|>" in second and second.endswith(">>>hm no<|im_end|><<<\n")


def test_prompts_alpaca_and_texts(tmp_path: Path):
    def of(record: Any, template: str = "") -> str:
        tokenizer = tokenizer_in(tmp_path)
        if not template:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (text,) = encoded(make_encoder(DataConfig(), tokenizer), record)
        return text

    assert of({"prompt": "1+1=", "completion": "2"}) == "1+1=>>>2<|im_end|><<<"
    assert of({"input": "a", "output": "b"}) == "a>>> b<|im_end|><<<"
    assert of({"text": "all"}) == ">>>all<|im_end|><<<"
    alpaca = of({"instruction": "Add.", "input": "1 1", "output": "2"})
    assert "paired with an input" in alpaca and alpaca.endswith("### Input:\n1 1\n\n### Response:\n>>>2<|im_end|><<<")
    assert "### Input" not in of({"instruction": "Add.", "input": "", "output": "2"})
    chat = of({"instruction": "Add.", "input": "1 1", "output": "2"}, CHATML)
    assert chat == "<|im_start|>user\nAdd.\n\n1 1<|im_end|>\n<|im_start|>assistant\n>>>2<|im_end|><<<\n"


@pytest.mark.full
def test_dolly_and_alpaca_with_system_and_history(tmp_path: Path):
    def of(record: Any) -> str:
        (text,) = encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path)), record)
        return text

    one = of({"instruction": "Add.", "context": "1 1", "response": "2", "category": "open_qa"})
    assert one == of({"instruction": "Add.", "input": "1 1", "output": "2"})
    more = of({"instruction": "more", "output": "no", "system": "", "history": [["hi", "yo"]]})
    assert more == TEXT
    told = of({"instruction": "hi", "output": "yo", "system": "Be kind."})
    assert told.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi")


@pytest.mark.full
@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS], ids=["prefixes", "blocks"])
def test_an_answer_of_weight_0_gives_no_loss(template: str, tmp_path: Path):
    messages = [MESSAGES[0], {**MESSAGES[1], "weight": 0}, MESSAGES[2], {**MESSAGES[3], "weight": 1}]
    expected = TEXT.replace(">>>yo<|im_end|><<<", "yo<|im_end|>")
    assert encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, template)), {"messages": messages}) == [expected]
    messages[3]["weight"] = 0.5
    with pytest.raises(UnusableRecord, match=r"weight 0\.5, which must be 0 or 1"):
        encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, template)), {"messages": messages})


# a template that writes calls, with null content as None and arguments as JSON
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ ' ' ~ (c.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.full
def test_openai_messages_are_rendered_as_a_template_can_read_them(tmp_path: Path):
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    for template in (
        CHATML,
        CHATML.replace("m.content", "(m.content | trim)"),
    ):  # which fails, and which prints the list
        assert encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, template)), {"messages": parts}) == [TEXT]
    parts[0]["content"].append({"type": "image_url", "image_url": {"url": "x"}})
    with pytest.raises(UnusableRecord, match="no text but image_url"):
        encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path)), {"messages": parts})

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    (text,) = encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, CALLS)), {"messages": messages})
    assert text.endswith('assistant\n>>>add {"a": 1}<|im_end|><<<\n')
    with pytest.raises(UnusableRecord, match="calls of tools, which the chat template leaves out"):
        encoded(make_encoder(DataConfig(), tokenizer_in(tmp_path, CHATML)), {"messages": messages})


# a template with roles of tools, which writes results as JSON
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>tool\n' ~ (m.content | tojson) ~ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' ~ (c.function | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FUNCTION = {"name": "add", "arguments": {"a": 1}}
WITH_TOOLS = (
    '<|im_start|>tools\n[{"name": "add"}]<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
    '<|im_start|>assistant\n>>><call>{"name": "add", "arguments": {"a": 1}}<|im_end|><<<\n'
    '<|im_start|>tool\n"say \\"2\\""<|im_end|>\n<|im_start|>assistant\n>>>yo<|im_end|><<<\n'
)


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


def test_calls_and_results_of_tools_have_the_template_s_roles_in_every_form(tmp_path: Path):
    result = 'say "2"'
    answer = {"role": "assistant", "content": "yo"}
    call = {"type": "function", "function": FUNCTION}
    openai = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    openai.insert(2, {"role": "tool", "tool_call_id": "1", "content": result})
    first_form = [MESSAGES[0], {"role": "assistant", "content": None, "function_call": FUNCTION}, answer]
    first_form.insert(2, {"role": "function", "name": "add", "content": result})
    of_sharegpt = [
        turns(("human", "hi"), ("function_call", json.dumps(value)), (name, result), ("gpt", "yo"))
        for value, name in ((FUNCTION, "observation"), ([FUNCTION], "tool"))
    ]
    records = [{"messages": openai}, {"messages": first_form}, *of_sharegpt]
    tokenizer = tokenizer_in(tmp_path, TOOLS)
    for record in records:
        for tools in ([{"name": "add"}], '[{"name": "add"}]'):
            assert encoded(make_encoder(DataConfig(), tokenizer), {**record, "tools": tools}) == [WITH_TOOLS]
        without = WITH_TOOLS[WITH_TOOLS.index("<|im_start|>user") :]
        assert encoded(make_encoder(DataConfig(), tokenizer), {**record, "tools": ""}) == [without]


def test_what_is_no_call_or_left_out_by_the_template_is_counted(tmp_path: Path):
    leaves_out = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    asked = ("human", "hi")
    lines = [
        turns(asked, ("gpt", "yo")),
        turns(asked, ("function_call", "add(1)"), ("observation", "2"), ("gpt", "yo")),
        turns(asked, ("function_call", '{"name": "add"}'), ("gpt", "yo")),
        turns(asked, ("observation", "2"), ("gpt", "yo")),
        {**turns(asked, ("gpt", "yo")), "tools": "add"},
        turns(asked, ("robot", "yo")),
    ]
    said: list[str] = []
    dataset = build(config_of(write_lines(tmp_path / "a", lines)), tokenizer_in(tmp_path, leaves_out), said=said)
    assert len(dataset.examples) == 1
    (told,) = [line for line in said if "cannot be used" in line]
    assert (
        "5 of 6 lines cannot be used: 2 has a turn from function_call that is no JSON with name and arguments" in told
    )
    assert "1 has results of tools, which the chat template leaves out; give one that writes them (line 4)" in told
    assert "1 has tools that are a text, which is no list in JSON (line 5)" in told
    assert "has a turn from 'robot'" in told


def test_examples_are_packed_whole_and_in_order():
    slots = np.array([3, 4, 2, 9, 1, 1, 9])
    assert [x.tolist() for x in pack(slots, np.arange(7), 9)] == [[0, 1, 2], [3], [4, 5], [6]]
    assert [x.tolist() for x in pack(slots, np.array([3, 6]), 9)] == [[3], [6]]
    assert pack(slots, np.array([], np.int64), 9) == []


def test_a_sample_has_the_tokens_labels_and_places_of_each_example_alone(tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path)
    dataset = build(config_of(write_lines(tmp_path / "a.jsonl", chats(20)), seq_length=150), tokenizer)
    seen = []
    for item in map(dataset.__getitem__, range(len(dataset))):
        for document in np.unique(item["document_ids"]):
            own = item["document_ids"] == document
            assert item["position_ids"][own].tolist() == (
                list(range(own.sum())) if item["loss_mask"][own].any() else [0] * own.sum()
            )
            if item["loss_mask"][own].any():
                tokens = [*item["tokens"][own], item["labels"][own][-1]]
                assert tokens[1:] == item["labels"][own].tolist()
                trained = np.array(tokens[1:])[item["loss_mask"][own] > 0]
                seen.append((tokenizer.detokenize(tokens), tokenizer.detokenize(trained)))
    expected = []
    for record in chats(20):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in record["messages"])
        answers = "".join(f"{m['content']}<|im_end|>" for m in record["messages"] if m["role"] == "assistant")
        expected.append((text, answers))
    assert sorted(seen) == sorted(expected)


def test_samples_do_not_depend_on_how_many_are_asked_for_and_an_epoch_has_each_example_once(tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path)
    config = config_of(write_lines(tmp_path / "a.jsonl", chats(30)), seq_length=100)
    epoch, long = build(config, tokenizer), build(config, tokenizer, 200)
    assert len(long) >= 200 and len(build(config, tokenizer, None, epochs=3)) >= 3 * len(epoch) - 6
    for i in range(len(epoch)):
        assert all(np.array_equal(epoch[i][name], long[i][name]) for name in epoch[i])
    first = [k for sample in long._samples_of(0) for k in sample]
    second = [k for sample in long._samples_of(1) for k in sample]
    assert sorted(first) == sorted(second) == list(range(30)) and first != second
    alone = build(config_of(*map(Path, config.data_path), seq_length=100, sft_packing=False), tokenizer)
    assert len(alone) == 30


def test_a_blend_takes_samples_of_each_file_by_its_weight(tmp_path: Path):
    """Each file is packed alone, and repeated where the weights ask for more; with files of each split as with shares of one list."""
    tokenizer = tokenizer_in(tmp_path)
    paths = [write_lines(tmp_path / f"{i}.jsonl", chats(12)[i::2]) for i in range(2)]
    words = ["3", str(paths[0]), "1", str(paths[1])]
    blend = build(config_of(*words, seq_length=100), tokenizer, 20)
    alone = [build(config_of(path, seq_length=100), tokenizer, 20) for path in paths]
    files = {"data_path": None, "split": None, "train_data_path": words, "valid_data_path": [str(paths[1])]}
    own = replace(config_of(*words, seq_length=100), **files)
    train, valid, _ = build_sft_datasets(own, tokenizer, [20, 2, 0], 7, say=lambda line: None)
    assert len(blend) == len(train) == 20 and len(valid.examples) == 6
    counts = [0, 0]
    for i in range(20):
        which = int(blend.indices.dataset_index[i])
        expected = alone[which][counts[which]]
        assert all(np.array_equal(item[name], expected[name]) for item in (blend[i], train[i]) for name in expected)
        counts[which] += 1
    assert counts == [15, 5] and len(alone[0].examples) == 6
    _, left_out, _ = build_sft_datasets(
        config_of(*words, split="99,1,0"), tokenizer, [2, 2, 0], 7, say=lambda line: None
    )
    assert left_out is None
    with pytest.raises(ConfigError, match="train: a blend with weights has no epoch"):
        build(config_of(*words), tokenizer)


def test_long_examples_are_cut_behind_whole_answers(tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path)
    turns = [{"role": role, "content": text * 10} for role, text in CHAT]
    records = [{"messages": turns}, {"messages": [{"role": "user", "content": "q" * 300}, turns[1]]}]
    said: list[str] = []
    dataset = build(config_of(write_lines(tmp_path / "a.jsonl", records), seq_length=80), tokenizer, said=said)
    assert len(dataset) == 1 and any(
        "1 examples are cut at the end of an answer and 1 are left out" in line for line in said
    )
    trained = dataset[0]["labels"][dataset[0]["loss_mask"] > 0]
    assert tokenizer.detokenize(trained.tolist()) == "yo" * 10 + "<|im_end|>"


def test_lines_that_cannot_be_used_are_counted_by_reason(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    bad = [{"messages": []}, {"messages": [{"role": "user", "content": "x"}]}, {"other": 1}, [1], {"messages": "x"}]
    write_lines(path, [*chats(3), *bad, {"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}])
    path.write_text(path.read_text() + "{broken\n")
    said: list[str] = []
    dataset = build(config_of(path), tokenizer_in(tmp_path), said=said)
    assert len(dataset.examples) == 3
    (told,) = [line for line in said if "cannot be used" in line]
    assert "7 of 10 lines cannot be used: 2 has no message of the assistant (line 4); " in told
    for reason in (
        "lacks messages, which the file's first line has",
        "is list, not an object",
        "is not valid JSON in UTF-8",
    ):
        assert reason in told
    first = next(line for line in said if line.startswith("the first example"))
    assert ">>>It is 0.<|im_end|><<<" in first
    # the second run reads the cache, and says the same
    again: list[str] = []
    build(config_of(path), tokenizer_in(tmp_path), said=again)
    assert told in again and not any("examples of the form" in line for line in again)


def test_a_cache_is_that_of_the_data_the_tokenizer_and_the_template(tmp_path: Path):
    """Each change makes tokens anew; another sequence length reads the same ones."""
    data = write_lines(tmp_path / "a.jsonl", chats(3))
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "ab", "completion": "abc"}])
    folder = tmp_path / "tokenizer"

    def made(path: Path, tokenizer: Any, **more: Any) -> int:
        """Return how many caches there are now."""
        build(config_of(path, data_cache_path=str(tmp_path / "cache"), **more), tokenizer)
        return len(list((tmp_path / "cache").rglob("*.json")))

    assert made(data, tokenizer_in(folder)) == 1
    assert made(data, tokenizer_in(folder), seq_length=128) == 1
    assert made(data, tokenizer_in(folder, CHATML.replace("m.content", "' ' + m.content"))) == 2
    (tmp_path / "template").write_text(CHATML + "{# mine #}")
    assert made(data, tokenizer_in(folder), chat_template=str(tmp_path / "template")) == 3
    assert made(data, tokenizer_in(folder), sft_split_turns=True) == 4
    write_lines(data, chats(4))
    assert made(data, tokenizer_in(folder)) == 5

    # the tokenizer's own file, and what ends a document among the same stop ids
    library = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = library["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(library))
    assert made(data, build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))) == 6
    tokenizer = tokenizer_in(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, END]}))
    assert made(pairs, tokenizer) == 7
    tokenizer.eod = 256
    assert made(pairs, tokenizer) == 8

    # merges, which are in a second file
    bpe = TokenizerConfig("GPT2BPETokenizer", vocab_file=str(tmp_path / "vocab"), merge_file=str(tmp_path / "merges"))
    names = ["a", "b", "c", "ab", "bc", "<|endoftext|>"]
    (tmp_path / "vocab").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    for count, merge in ((9, "a b"), (10, "b c")):
        (tmp_path / "merges").write_text(f"#version: 0.2\n{merge}\n")
        assert made(pairs, build_tokenizer(bpe)) == count


def test_the_file_of_a_tokenizer_of_another_kind_is_part_of_its_cache(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "1 2", "completion": "3 4"}])
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=40))
    tokenizer.path = str(tmp_path / "model")
    for count, content in ((1, "one"), (2, "two")):
        (tmp_path / "model").write_text(content)
        build(config_of(path), tokenizer)
        assert len(list((tmp_path / "cache").rglob("*.json"))) == count


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is empty; give a file with an example a line"),
        (
            '{"question": "x", "answer": "y"}',
            "the first line has question, answer, and examples need one of these sets of keys",
        ),
        ("[1]", "the first line has list, and examples need"),
        ('[\n {"text": "x"}\n]\n', "write the elements to lines: python -c"),
        ('{"text": "x", "role": "prompter", "parent_id": null}', "is one message of a tree"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "none of its 1 lines can be used: 1 has no message of the assistant",
        ),
        ('{"prompt": "x", "completion": ""}', "1 has no token that gives loss: no answer, or an empty one"),
    ],
)
def test_data_without_any_example_are_refused(content: str, problem: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError) as error:
        build(config_of(tmp_path / "a.jsonl"), tokenizer_in(tmp_path))
    assert problem in str(error.value)
    assert not list(tmp_path.rglob("*.idx")) and not list(tmp_path.rglob("*.bin"))


def test_conversations_need_a_template_whose_tokens_tell_their_characters(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", chats(2))
    tokenizer = tokenizer_in(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ConfigError, match="has no chat template; give one with --chat-template FILE"):
        build(config_of(path), tokenizer)
    (tmp_path / "template").write_text("{% for")
    with pytest.raises(ValueError, match="template is not a chat template that can be used: line 1"):
        build(config_of(path, chat_template=str(tmp_path / "template")), tokenizer)
    null = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=40))
    with pytest.raises(ConfigError, match="has no chat template"):
        build(config_of(path), null)
    numbers = write_lines(tmp_path / "b.jsonl", [{"prompt": "1 2", "completion": "3 4"}])
    item = build(config_of(numbers), null)[0]
    assert item["labels"][:4].tolist() == [2, 3, 4, 40] and item["loss_mask"][:5].tolist() == [0, 1, 1, 1, 0]


def test_no_token_of_text_is_special(tmp_path: Path):
    """As the fixture has it: the template's own tokens are single ids."""
    tokenizer = tokenizer_in(tmp_path)
    assert [tokenizer.tokenize(token) for token in SPECIAL] == [[256], [257], [END]]
    assert isinstance(build(config_of(write_lines(tmp_path / "a", chats(2))), tokenizer), SFTDataset)
