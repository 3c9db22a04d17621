"""Text to token ids and back, with the light `tokenizers` package alone. Pure once loaded.

Reads a Hugging Face model folder: `tokenizer.json`, and `config.json` and `generation_config.json` for the stop ids
and the size of the vocabulary. A prompt's canonical ids are its plain encoding, or that of a chat written by the
folder's chat template.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.chat import TEMPLATE_FILE, ChatTemplate, Message, load_template
from protocol.errors import ModelMissingError, RolloutMalformedError, UsageError


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`vocab_size` is the model's (ids run from 0 below it); `stop_ids` end a completion; `pad_id` is harmless."""

    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    _backend: Any
    chat_template: ChatTemplate | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, with whatever marks the tokenizer itself puts around a prompt."""
        return tuple(self._backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, up to where the model is to answer. Raises `UsageError` without a template for it."""
        if self.chat_template is None:
            raise UsageError(
                "the prompt is a chat, which cannot be written for this model",
                why="its folder has no chat template",
                remedy=f"Put a {TEMPLATE_FILE} into the base folder, or use prompts that are plain text.",
            )
        return tuple(self._backend.encode(self.chat_template.render(messages), add_special_tokens=False).ids)

    def encode_reply(self, messages: Sequence[Message], reply: str, *, end: int) -> tuple[int, ...]:
        """Token ids of a tool's reply to a turn that ended with the stop id `end`, up to where the model is to go on;
        after a prompt that is plain text (no `messages`) the reply stands alone. Raises `UsageError` where the chat
        template cannot write it, or nothing is left of it."""
        text = reply
        if messages and self.chat_template is not None:
            text = self.chat_template.render_reply(messages, reply).removeprefix(self._backend.id_to_token(end) or "")
        token_ids = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        if not token_ids:
            raise UsageError("a reply was refused", why="the model's tokenizer makes no token of it")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, special tokens left out. Raises `RolloutMalformedError` on an id out of range."""
        bad = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise RolloutMalformedError(
                f"token id {bad} is not in the vocabulary",
                why=f"the model has ids 0 to {self.vocab_size - 1}",
            )
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises `ModelMissingError` when the folder lacks one."""
    from tokenizers import Tokenizer as Backend

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelMissingError(
            f"{model_dir} has no tokenizer.json",
            why="only fast tokenizers are supported",
            remedy="Save the tokenizer with transformers first.",
        )
    backend = Backend.from_file(str(path))
    config, generation = _read(model_dir / "config.json"), _read(model_dir / "generation_config.json")
    stop_ids = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    pad_ids = _ids(generation.get("pad_token_id")) or _ids(config.get("pad_token_id"))
    vocab_size = max(int(config.get("vocab_size", 0)), backend.get_vocab_size())
    return Tokenizer(stop_ids, (pad_ids or stop_ids or (0,))[0], vocab_size, backend, load_template(model_dir))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
