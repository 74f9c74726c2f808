"""Prompts to sample from."""

from __future__ import annotations

import json
import unicodedata
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
    """Reads the lines of a text file, without empty ones.

    Raises:
        ValueError: no such file, not UTF-8, no prompt in it, or a line that `require_prompt` refuses.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {file} cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            require_prompt(line.strip(), f"{file}, line {number}")
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ValueError(f"prompts: {file} has no prompt; write one per line")
    return prompts


def require_prompt(text: str, where: str) -> None:
    """Checks that a text is a prompt. The error names ``where`` it stands.

    Raises:
        ValueError: control characters such as NUL, nothing that can be seen, or a JSON object or list.
    """
    kinds = {unicodedata.category(character) for character in text}
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    if "Cc" in {unicodedata.category(character) for character in text if character != "\t"}:
        raise ValueError(f"prompts: {where} must be text without control characters, got {shown!r}")
    if kinds <= {"Cf", "Zs", "Cc", "Mn"}:
        raise ValueError(f"prompts: {where} must hold something to read, got {shown!r}")
    if text[0] in "{[" and _is_json(text):
        raise ValueError(f"prompts: {where} must be the prompt alone, got JSON: {shown}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
