"""How a command ends that fails: words for people, and a code. Pure."""

from protocol.errors import HexcombError

INTERRUPTED = 130


def explain(error: HexcombError) -> str:
    """What happened, why, and what to do, one line each."""
    lines = [f"error: {error.what}"]
    lines += [f"  why: {error.why}"] if error.why else []
    lines += [f"  do:  {error.remedy}"] if error.remedy else []
    return "\n".join(lines)
