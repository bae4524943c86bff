"""Chat templates are programs of strangers: what they may compute, and that one line says what one may not."""

import pytest
from sft_folder import CHATML, CHATML_BLOCKS

from megatron.core.tokenizers import chat_template
from megatron.core.tokenizers.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateStopped

MESSAGES = [{"role": "user", "content": "<hi> 'ü'"}, {"role": "assistant", "content": "yo"}]


def render(source: str, **more) -> str:
    with ChatTemplate(source, {"bos_token": "<s>"}, "chat_template.jinja") as template:
        return template.render(MESSAGES, **more)


def test_the_names_and_filters_of_transformers_are_there():
    assert (
        render("{{ messages | tojson }}")
        == '[{"role": "user", "content": "<hi> \'ü\'"}, {"role": "assistant", "content": "yo"}]'
    )
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}") == "<s>FalseTrue"
    assert render("{{ tools[0].a }}", tools=[{"a": 1}], add_generation_prompt=True) == "1"
    assert (
        render("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "user"
    )
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    with pytest.raises(ChatTemplateError, match=r"the chat template chat_template\.jinja: no system"):
        render("{{ raise_exception('no system') }}")


def test_blocks_and_prefixes_give_the_same_answers():
    for source, end in ((CHATML, "<|im_end|>\n"), (CHATML_BLOCKS, "<|im_end|>")):
        with ChatTemplate(source, {}, "x") as template:
            text, spans = template.render_answers(MESSAGES)
            assert [text[start:stop] for start, stop in spans] == [f"yo{end}"] and "\ue000" not in text


def test_a_template_that_is_no_prefix_of_itself_is_told():
    with (
        ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {}, "x") as template,
        pytest.raises(
            ChatTemplateError, match="turn 2 with its answer does not begin with the conversation that asks for it"
        ),
    ):
        template.render_answers(MESSAGES)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "undefined|unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "undefined|unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ 'a' * 10000000000 }}", "uses more than 1 GB|used more than|process ended"),
        ("{% for i in range(90000) %}{{ 'a' * 900 }}{% endfor %}", "more than 1,048,576 characters"),
        ("{% for", "line 1"),
    ],
)
def test_a_hostile_template_is_one_line(source: str, problem: str):
    with pytest.raises(ValueError, match=problem) as error:
        print(repr(render(source))[:200])
    assert isinstance(error.value, ChatTemplateError | ChatTemplateStopped) and "\n" not in str(error.value)


def test_endless_work_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "_START_SECONDS", 3.0)
    monkeypatch.setattr(chat_template, "_SECONDS", 0.3)
    endless = "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    with ChatTemplate(endless, {}, "x") as template:
        assert template.render(MESSAGES[:1]) == ""
        with pytest.raises(ChatTemplateStopped, match=r"used more than 0 s or 1 GB for one conversation"):
            template.render(MESSAGES)
        assert template.render(MESSAGES[:1]) == "", "a new process goes on"
