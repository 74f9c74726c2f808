"""The documents keep their word: tests and files that they name exist, code compiles, and examples run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import analysis.__main__
import bench.__main__
import jagg_core.__main__
import jagg_core.grpo.command
from bench.cost import Machine, Update
from bench.matched import fitting, matched
from bench.speed_ups import update_speed_ups
from bench.work import PassWork
from jagg_core.records import Record

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
METHOD = ROOT / "docs" / "method.md"
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), CONTRIBUTING, ROOT / "CHANGELOG.md", ROOT / "README.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TEST = re.compile(r"\b((?:tests|bench)/[\w/]+\.py)::(\w+(?:::\w+)*)")
FILE = re.compile(r"`((?:jagg_core|analysis|bench|tests|docs)/[\w./]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@cache
def known_tests(path: Path) -> frozenset[str]:
    """Names of a file's tests, as pytest writes them after the path; read from the source, nothing is run."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def missing_tests(text: str) -> list[str]:
    """Tests that ``text`` names and that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in TEST.findall(text)
        if not (ROOT / file).is_file() or name not in known_tests(ROOT / file)
    ]


def missing_files(text: str) -> list[str]:
    """Files and folders of this checkout that ``text`` names in backquotes and that do not exist."""
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead nowhere, or to a heading that is not there; code is left out."""

    def leads_nowhere(link: str) -> bool:
        name, _, heading = link.partition("#")
        path = folder / name
        if not path.exists():
            return True
        return bool(heading) and heading not in headings(path.read_text(encoding="utf-8") if name else text)

    links = LINK.findall(re.sub(r"`[^`]*`", "", FENCE.sub("", text)))
    return [link for link in links if "://" not in link and leads_nowhere(link)]


def headings(text: str) -> set[str]:
    """Anchors of headings, as the usual hosts make them."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def sections(text: str) -> dict[str, str]:
    """What stands under each heading of the second level, by its title."""
    parts = re.split(r"^## +(.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(text: str) -> list[list[str]]:
    """Module and arguments of every ``python -m`` line of the shell blocks for packages of this project."""
    lines = "\n".join(code for language, code in FENCE.findall(text) if language == "sh").replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in lines.splitlines()]
    modules = [words[words.index("-m") + 1 :] for words in found if "-m" in words]
    return [words for words in modules if words[0] in ("jagg_core", "analysis", "bench")]


def parse(module: str, arguments: list[str]) -> None:
    """As the command line does, without running it; exits for a flag or a value that it does not know."""
    if (module, arguments[0]) == ("jagg_core", "train"):
        jagg_core.grpo.command.parser({}).parse_args([a for a in arguments[1:] if a != "run.yaml" and a != "--config"])
    else:
        parsers = {"jagg_core": jagg_core.__main__, "analysis": analysis.__main__, "bench": bench.__main__}
        parsers[module].parser().parse_args(arguments)


def python_blocks(text: str) -> list[str]:
    """Code of every fenced block that says it is Python."""
    return [code for language, code in FENCE.findall(text) if language == "python"]


@each_document
def test_every_test_that_is_named_exists(document: Path) -> None:
    assert missing_tests(document.read_text(encoding="utf-8")) == []


@each_document
def test_every_file_that_is_named_exists(document: Path) -> None:
    assert missing_files(document.read_text(encoding="utf-8")) == []


@each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document.read_text(encoding="utf-8"), document.parent) == []


@each_document
def test_python_compiles(document: Path) -> None:
    for code in python_blocks(document.read_text(encoding="utf-8")):
        compile(code, document.name, "exec")


@each_document
def test_every_command_is_understood(document: Path) -> None:
    for module, *arguments in commands(document.read_text(encoding="utf-8")):
        parse(module, arguments)


def test_commands_are_found() -> None:
    code = "make test\npython -m bench run --preset digits  # 4 minutes\ntorchrun -m jagg_core train \\\n --out x\n"
    text = f"Text\n```sh\n{code}```\n"
    assert commands(text) == [["bench", "run", "--preset", "digits"], ["jagg_core", "train", "--out", "x"]]
    assert len(commands((ROOT / "README.md").read_text(encoding="utf-8"))) >= 5


@pytest.mark.parametrize("command", ["bench run --preset digit", "analysis curves --arm exact x --outt y"])
def test_a_wrong_command_is_noticed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, *arguments = command.split()
    with pytest.raises(SystemExit):
        parse(module, arguments)


def test_every_section_of_the_method_names_a_test() -> None:
    """But the last, which says what is not shown."""
    *shown, last = sections(METHOD.read_text(encoding="utf-8")).items()
    assert len(shown) >= 8
    assert [title for title, text in shown if not TEST.search(text)] == []
    assert last[0] == "What is not shown here"


# Examples of CONTRIBUTING.md, and what each has to have found

EXAMPLES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "Add an estimator": lambda names: (
        names["nearest_plan"](names["trajectory"].sigmas, [0, 3, 5, 7, 9]).anticipating
        and all(0.8 < cosine < 0.9999 for cosine in names["cosines"].values())
        and len(names["cosines"]) == 2
    ),
    "Add a backbone": lambda names: len(names["findings"]) > 10 and all(f.ok for f in names["findings"]),
    "Add a reward": lambda names: names["values"].tolist() == [1, 0],
    "Add a bench arm or cell": lambda names: names["error"] < 1e-5 and names["run"].plan.passes == 1,
    "Add a figure": lambda names: sorted(names["files"]) == ["png", "svg"],
}


def test_every_example_is_run() -> None:
    shown = {title: len(python_blocks(text)) for title, text in sections(CONTRIBUTING.read_text("utf-8")).items()}
    assert {title: count for title, count in shown.items() if count} == dict.fromkeys(EXAMPLES, 1)


@pytest.mark.parametrize("title", EXAMPLES)
def test_examples_run(title: str) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    [code] = python_blocks(sections(CONTRIBUTING.read_text("utf-8"))[title])
    exec(compile(code, f"CONTRIBUTING.md, {title}", "exec"), names)
    assert EXAMPLES[title](names)


# What would be found

HERE = "tests/test_docs.py::"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"`{HERE}test_examples_run`", []),
        (f"`{HERE}test_examples_run`, `{HERE}test_that_nobody_wrote`.", [f"{HERE}test_that_nobody_wrote"]),
        (f"`{HERE}TestNone::test_examples_run`", [f"{HERE}TestNone::test_examples_run"]),
        (f"`{HERE}missing_tests`", [f"{HERE}missing_tests"]),
        ("see tests/none.py::test_x", ["tests/none.py::test_x"]),
    ],
)
def test_a_test_that_does_not_exist_is_found(text: str, missing: list[str]) -> None:
    assert missing_tests(text) == missing


def test_tests_in_classes_are_named_with_them(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("class TestA:\n    def test_b(self): ...\n    def help(self): ...\ndef test_c(): ...\ntest_d = 1\n")
    assert known_tests(file) == {"TestA::test_b", "test_c"}


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing_files("`jagg_core/policy.py`, `jagg_core/no.py`, `bench/`, `other/x.py`") == ["jagg_core/no.py"]


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](README.md) [b](https://example.org/none) `[c](none.md)`", []),
        ("[a](none.md) [b](README.md#estimators)", ["none.md"]),
        ("[a](README.md#no-such-heading)", ["README.md#no-such-heading"]),
        ("## My heading\n[a](#my-heading) [b](#your-heading)", ["#your-heading"]),
        ("```python\nPLANS[name](sigmas)\n```\n", []),
    ],
)
def test_a_broken_link_is_found(text: str, broken: list[str]) -> None:
    assert broken_links(text, ROOT) == broken


GROUPS = {"exact-again": 0, "prototype": 1, "paper-joint": 2, "closed-form-sequential": 3, "closed-form-batched": 4}
"""Rows of the table of groups in docs/timing.md."""


@pytest.mark.parametrize(
    ("run", "backbone", "column"),
    [("photos-flux", "digits-flux", 1), ("photos-flux", "photos-flux", 2), ("photos-qwen", "photos-qwen", 3)],
)
def test_groups_are_as_fast_as_the_page_says(run: str, backbone: str, column: int) -> None:
    page = (ROOT / "docs" / "timing.md").read_text().split("## Groups and updates, measured")[1]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")][2:7]
    speed = pd.read_csv(ROOT / "results" / "reference" / run / "tables" / "speed.csv")
    own = speed[speed["backbone"] == backbone].set_index("arm")
    for arm, row in GROUPS.items():
        value, low, high = own.loc[arm, ["speed_up", "speed_up_low", "speed_up_high"]]
        assert rows[row][column].strip() == f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def test_updates_are_as_fast_as_the_page_says() -> None:
    page = (ROOT / "docs" / "timing.md").read_text()
    rows = update_speed_ups(Record.read(ROOT / "results" / "reference" / "bench" / "update-photos-flux.json"))
    for row in rows:
        if row["arm"] not in ("exact", "exact-closed-form"):
            texts = [f"{r.value:.2f}x [{r.low:.2f}, {r.high:.2f}]" for r in (row["update"], row["step"])]
            assert f"| {' | '.join(texts)} |" in page, row["arm"]


def savings() -> list[str]:
    """Rows of the table of predicted savings in docs/timing.md."""
    rows = matched(PassWork(forward=1e12, backward=2e12, parameters=1), Update(), Machine())
    shares = ("with_checkpointing", "without", "several_steps")
    texts = [
        [row["plan"], str(row["passes"]), *(f"{row[share]:.1%}".replace("%", " %") for share in shares)] for row in rows
    ]
    return [f"| {' | '.join(row)} |" for row in texts]


def test_savings_are_predicted_as_the_page_says() -> None:
    page = (ROOT / "docs" / "timing.md").read_text()
    table = page.split("| plan | passes of 20 | with checkpointing |")[1].split("\n\n")[0]
    assert table.splitlines()[2:] == savings()
    work = PassWork(forward=1e12, backward=2e12, parameters=1)
    fits = fitting(work, (0.173, 0.182), Machine(checkpointing=True))
    assert f"of a step: {len(fits)} of them" in " ".join(page.split())
