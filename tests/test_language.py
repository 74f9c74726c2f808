"""Docstrings of functions begin with a verb in the third person; some words are not used, as nouns or as fillers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LATER = ("jagg_core/grpo/", "analysis/report/", "analysis/statistics/")
"""Folders whose public docstrings are not all rewritten yet."""

NOUNS = re.compile(r"(Bytes|Figures|GB/s|Graphs|Seconds|Settings|This|Its|\w+s of)\b")
"""Beginnings with an s at the end of a word that is no verb."""

WORDS = re.compile(r"\b(told|said|found|anew|beside)\b")


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(one).split("(")[0] for one in node.decorator_list}


def openings(text: str) -> Iterator[tuple[str, str]]:
    """Name and first words of the docstring of every public function; not of properties, which are nouns."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "test_")):
            about = ast.get_docstring(node) or "See"
            if not about.startswith("See") and not decorators(node) & {"property", "cached_property", "_check"}:
                yield node.name, about.splitlines()[0]


def without_verb(text: str) -> list[str]:
    return [
        f"{name}: {line}"
        for name, line in openings(text)
        if NOUNS.match(line) or line.split()[0].strip(".,:")[-1] != "s"
    ]


@pytest.mark.parametrize("package", ["jagg_core", "bench", "analysis"])
def test_docstrings_begin_with_a_verb(package: str) -> None:
    files = [path for path in sources(package) if not path.relative_to(ROOT).as_posix().startswith(LATER)]
    assert files
    wrong = {path.relative_to(ROOT).as_posix(): without_verb(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["Seconds of a pass.", "Samples of exact.", "The plan.", "Make a plan.", "Bytes alive."]
)
def test_a_docstring_without_a_verb_is_noticed(line: str) -> None:
    assert without_verb(f'def f():\n    """{line}"""') == [f"f: {line}"]
    assert without_verb('def f():\n    """Returns the plan."""\ndef _g():\n    """The plan."""') == []


def without_must(text: str) -> list[str]:
    """Texts of errors that say what they got and not what it must be."""
    calls = [node.exc for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise)]
    texts = [ast.unparse(call) for call in calls if isinstance(call, ast.Call)]
    return [
        one
        for one in texts
        if re.match(r"(Value|Type)Error\b.*\bgot\b", one) and not re.search(r"\bmust\b|wanted", one)
    ]


def test_errors_say_what_a_value_must_be() -> None:
    files = [*sources("bench", "analysis/measure", "jagg_core/engine", "jagg_core/plans", "jagg_core/integrations")]
    wrong = [
        text for path in (*files, *(ROOT / "jagg_core").glob("*.py")) for text in without_must(path.read_text("utf-8"))
    ]
    assert wrong == []
    assert (
        len(without_must("raise ValueError(f'takes one value, got {2}')\nraise ValueError(f'must be 1, got {2}')")) == 1
    )


def test_words_that_say_nothing_are_not_used() -> None:
    files = [*sources("bench", "jagg_core", "analysis/measure"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files = [path for path in files if not path.relative_to(ROOT).as_posix().startswith(LATER)]
    lines = [
        f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert lines == []
