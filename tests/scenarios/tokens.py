"""Tokens of a slot without their content: pieces are (version, number of tokens). Pure."""

from collections.abc import Sequence

from protocol.ids import Digest, Version

Tokens = tuple[tuple[Version, int], ...]


def tokens_word(pieces: Sequence[tuple[int, int]]) -> str:
    """`v0*4 v1*2` is four tokens of version 0 and two of version 1."""
    return " ".join(f"v{version}*{length}" for version, length in pieces)


def tokens_of(words: Sequence[str]) -> Tokens:
    """The inverse of `tokens_word`, word by word."""
    split = [word[1:].split("*") for word in words]
    return tuple((Version(int(version)), int(length)) for version, length in split)


def edges(slot: str, pieces: Sequence[tuple[Version, int]]) -> list[Digest]:
    """A readable stand-in for the chain of digests: equal exactly for equal pieces of the same slot."""
    return [Digest(f"{slot} {tokens_word(pieces[: count + 1])}") for count in range(len(pieces))]


def behind(edge: Digest) -> Tokens:
    """The pieces up to an edge."""
    return tokens_of(edge.split(" ")[1:])


def merged(pieces: Sequence[tuple[Version, int]]) -> Tokens:
    """Neighbours of one version as one segment."""
    found: list[tuple[Version, int]] = []
    for version, length in pieces:
        before = found.pop()[1] if found and found[-1][0] == version else 0
        found.append((version, before + length))
    return tuple(found)
