"""A small word-and-digit tokenizer, made from an environment's own training prompts. Writes files in one folder.

Words, single digits, single spaces and single other characters are tokens, so text comes back from its ids exactly;
the vocabulary is what the prompts and answers use, plus the digits and signs of any answer. Saved as an ordinary
`tokenizer.json`, which `tokenizers` and transformers both read.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
PIECE = r"[0-9]|[^\W\d_]+|\s|[^\s]"
ALWAYS = ("+", "-", ".", "=", *"0123456789")


def vocabulary_of(texts: Iterable[str]) -> list[str]:
    """The pieces of `texts` and those that are always there, sorted, behind the three special tokens."""
    pieces = set(ALWAYS)
    for text in texts:
        pieces.update(re.findall(PIECE, text))
    return [PAD, END, UNKNOWN, *sorted(pieces)]


def write_tokenizer(folder: Path, vocabulary: list[str], *, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`; `vocabulary` is in the order of ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, END, UNKNOWN])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
