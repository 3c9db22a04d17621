"""Chat templates: the text that transformers would write, in a sandbox, the same on every day."""

import json
from pathlib import Path

import pytest

from node.tokenizer import vocabulary_of, write_tokenizer
from protocol.chat import Message, load_template
from protocol.errors import UsageError
from protocol.tokens import load_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- else %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "Today: " + date_string + "\\n" + system_message }}
{%- for message in messages if message.role != 'tool' %}
    {%- if loop.index0 > 90 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt and not tools %}{{ "assistant:" }}{% endif %}
"""
CHATS = [
    (Message("user", "2 + 2 = ?"),),
    (Message("system", " Add. "), Message("user", "<b>'é\n{{ 7 * 7 }}")),
    (Message("user", "1"), Message("assistant", "2"), Message("user", "3")),
]


def write_model(folder: Path, template: str, *, in_config: bool = False) -> Path:
    """A model folder with a tokenizer and a template."""
    write_tokenizer(folder, vocabulary_of(["2 + 2 = ? assistant user"]), max_length=64)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 1}))
    path = folder / "tokenizer_config.json"
    bos = {"__type": "AddedToken", "content": "<pad>", "lstrip": False, "rstrip": False, "normalized": False}
    config = json.loads(path.read_text()) | {"bos_token": bos, "add_bos_token": True}
    if in_config:
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "turns"])
def test_a_chat_is_written_as_transformers_writes_it(
    tmp_path: Path, template: str, chat: tuple[Message, ...], in_config: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_model(tmp_path, template, in_config=in_config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = [{"role": message.role, "content": message.content} for message in chat]
    frozen = template.replace("strftime_now is defined", "false")  # transformers has today's date
    expected = theirs.apply_chat_template(plain, chat_template=frozen, tokenize=False, add_generation_prompt=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(chat) == expected
    assert tokenizer.encode_chat(chat) == tuple(theirs(expected, add_special_tokens=False)["input_ids"])


def test_a_reply_is_written_as_transformers_writes_what_follows_the_turn(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_model(tmp_path, CHATML)
    theirs, tokenizer = PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(folder)
    for chat in CHATS:
        said = [*chat, Message("assistant", "2 * 2"), Message("tool", "= 4")]
        plain = [{"role": message.role, "content": message.content} for message in said]
        whole = theirs.apply_chat_template(plain, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
        rest = whole.rpartition("2 * 2")[2]
        assert rest.startswith("<|im_end|>\n<|im_start|>tool\n= 4")
        assert tokenizer.chat_template is not None
        assert tokenizer.chat_template.render_reply(chat, "= 4") == rest
        end = theirs.convert_tokens_to_ids("<end>")
        expected = theirs(rest.removeprefix("<end>"), add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_reply(chat, "= 4", end=end) == tuple(expected)


def test_a_reply_leaves_out_the_end_of_turn_that_was_sampled(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer = load_tokenizer(write_model(tmp_path, template))
    assert tokenizer.encode_reply(CHATS[0], "2", end=1) == tokenizer.encode("2<end>")
    assert tokenizer.encode_reply(CHATS[0], "2", end=0) == tokenizer.encode("<end>2<end>")
    assert tokenizer.encode_reply((), "2", end=1) == tokenizer.encode("2")
    with pytest.raises(UsageError, match="no token"):
        tokenizer.encode_reply((), "", end=1)


@pytest.mark.parametrize("reply", ["6", "assistant", "Today"])
def test_a_template_that_leaves_tools_out_is_refused(tmp_path: Path, reply: str) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, LLAMA))
    with pytest.raises(UsageError, match="tool's message"):
        tokenizer.encode_reply(CHATS[0], reply, end=1)


def test_several_templates_with_names_have_a_default(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "")
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "mine"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_template(folder)
    assert template is not None
    assert template.render(CHATS[0]) == "mine"


def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CHATML)
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("2 + 2")
    with pytest.raises(UsageError, match="no chat template") as caught:
        tokenizer.encode_chat(CHATS[0])
    assert "chat_template.jinja" in caught.value.remedy


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system please') }}",
        "{{ strftime_now('%Y') }}",
        "{{ messages[0]['content'].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' * 5000000 }}",
        "{{ 1 / 0 }}",
        "{% for message in messages %}",
        "{% include 'other' %}",
        "",
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template))
    with pytest.raises(UsageError) as caught:
        tokenizer.encode_chat(CHATS[0])
    assert caught.value.why
    assert caught.value.remedy


def test_the_reason_of_a_template_reaches_the_organizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, "{{ raise_exception('no system please') }}"))
    with pytest.raises(UsageError, match="no system please"):
        tokenizer.encode_chat(CHATS[1])
