"""The one table that every bench prints: what was measured, against what, and whether it is enough. Prints.

A figure that came out of a simulation says so; a bench whose table misses a threshold ends with status 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line. `anchor` says what the value is measured against, `threshold` what it must reach (empty = reported
    only, always passed)."""

    name: str
    value: float
    unit: str
    threshold: str
    passed: bool
    anchor: str
    simulated: bool = False


def at_least(name: str, value: float, least: float, *, unit: str = "", anchor: str, simulated: bool = False) -> Figure:
    """A figure that must not be smaller than `least`."""
    return Figure(name, value, unit, f">= {least:g} {unit}".strip(), value >= least, anchor, simulated)


def at_most(name: str, value: float, most: float, *, unit: str = "", anchor: str, simulated: bool = False) -> Figure:
    """A figure that must not be larger than `most`."""
    return Figure(name, value, unit, f"<= {most:g} {unit}".strip(), value <= most, anchor, simulated)


def reported(name: str, value: float, *, unit: str = "", anchor: str, simulated: bool = False) -> Figure:
    """A figure without a threshold."""
    return Figure(name, value, unit, "", True, anchor, simulated)


def print_table(figures: Sequence[Figure]) -> bool:
    """Prints the table; whether every threshold was reached."""
    rows = [("figure", "value", "threshold", "pass", "measured against")]
    for figure in figures:
        name = f"{figure.name} (simulated)" if figure.simulated else figure.name
        verdict = ("yes" if figure.passed else "NO") if figure.threshold else "-"
        rows.append((name, f"{figure.value:.4g} {figure.unit}".strip(), figure.threshold, verdict, figure.anchor))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4])
    return all(figure.passed for figure in figures)
