"""Prompts to draw from."""

from __future__ import annotations

from pathlib import Path

PROMPTS = (
    "a red fox asleep on a mossy rock, morning light",
    "an old bicycle leaning against a yellow wall",
    "three green apples and a silver spoon on a wooden table",
    "a lighthouse in a storm, seen from the sea",
    "a paper boat on a puddle, reflections of street lamps",
    "a watercolour of a mountain village in winter",
    "a robot watering tomato plants in a greenhouse",
    "the word HELLO written in chalk on a blackboard",
)
"""Objects, counts, colours, styles, places and text: a few of each, for measuring without a data set."""


def read_prompts(file: str) -> tuple[str, ...]:
    """The lines of a text file, without empty ones.

    Raises:
        ValueError: no such file, not UTF-8, or no prompt in it.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {file} cannot be read as text: {error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ValueError(f"prompts: {file} has no prompt; write one per line")
    return found
