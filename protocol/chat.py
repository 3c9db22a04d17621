"""Chat templates: a model's own way to write messages as one text. Pure once loaded.

Invariant: equal messages give equal text, on every day: a template that asks for the date is refused, unless it has a
way without. Templates are programs that came with a model, so they run in jinja2's sandbox, and only where the
organizer's prompts are made; nodes get token ids.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from protocol.errors import UsageError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
REPLIED_TO, REPLY = "\ue000turn\ue000", "\ue000reply\ue000"
"""Stand for a turn, and for what a tool answers to it: no template changes them, and no other text holds them."""

MAX_RENDERED = 4 << 20
"""Characters that a rendered chat may have."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`text` is the template, `tokens` the special tokens that it may name, such as `bos_token`."""

    text: str
    tokens: dict[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The messages as one text, up to where the model is to go on. Raises `UsageError`."""
        template = _compile(self.text)
        try:
            rendered = str(
                template.render(
                    messages=[asdict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self.tokens,
                )
            )
        except Exception as error:  # a template may fail in any way that Python can
            raise UsageError(
                "the model's chat template cannot write the prompt",
                why=f"{type(error).__name__}: {error}",
                remedy="Give it messages that it knows, or a template that needs nothing but messages.",
            ) from error
        if not 0 < len(rendered) <= MAX_RENDERED:
            raise UsageError(
                f"the model's chat template made {len(rendered)} characters of a prompt",
                why=f"1 to {MAX_RENDERED} are sound",
                remedy="Put a sound template into the base folder.",
            )
        return rendered

    def render_reply(self, messages: Sequence[Message], reply: str) -> str:
        """What follows the text of the model's turn after `messages`: the end of that turn, a tool's message, and the
        opening of the next turn. Raises `UsageError`."""
        before = (*messages, Message("assistant", REPLIED_TO))
        _, _, rest = self.render((*before, Message("tool", reply))).partition(REPLIED_TO)
        if REPLY not in self.render((*before, Message("tool", REPLY))).partition(REPLIED_TO)[2]:
            raise UsageError(
                "the model's chat template cannot write a tool's message",
                why="the message is not in what it makes",
                remedy="Give the base folder a template that knows the role `tool`.",
            )
        return rest


def load_template(model_dir: Path) -> ChatTemplate | None:
    """The template of a model folder, None if it has none. What is wrong with it shows when it is used."""
    config_path, path = model_dir / CONFIG_FILE, model_dir / TEMPLATE_FILE
    config = dict(json.loads(config_path.read_text())) if config_path.is_file() else {}
    text = path.read_text() if path.is_file() else _default_of(config.get("chat_template"))
    if text is None:
        return None
    tokens = {name: token for name, token in config.items() if name.endswith("_token") and _is_token(token)}
    return ChatTemplate(text, {name: _content(token) for name, token in tokens.items()})


def _default_of(found: Any) -> str | None:
    """The template of a configuration: one text, or several with names."""
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found}.get("default")
    return found if isinstance(found, str) and found else None


def _is_token(token: Any) -> bool:
    return isinstance(token, str) or (isinstance(token, dict) and "content" in token)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


@lru_cache(maxsize=4)
def _compile(text: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            """The block's content in a scope of its own."""
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise UsageError(
            "the model's chat template cannot be read", why=str(error), remedy=f"Mend {TEMPLATE_FILE}, or remove it."
        ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
