"""What the pages say, where it can be checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from jagg_core import integrations
from jagg_core.integrations import window_plan
from tests.integrations.hosts import CLASS_HOSTS, HOSTS

DOCS = Path(__file__).parents[2] / "docs" / "integrations"
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name != "README.md")
COMMON = (DOCS / "README.md").read_text()


def test_there_is_a_page_for_every_host_and_a_host_for_every_page() -> None:
    assert {page.stem for page in PAGES} == {host.page for host in HOSTS.values()} | set(CLASS_HOSTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_the_commit_that_was_run_or_says_that_none_was(page: Path) -> None:
    text = page.read_text()
    opening = text.split("\n\n")[1]
    sections = ["What to replace", "Settings that conflict", "What to expect"]
    commit = re.search(r"at\s+commit ([0-9a-f]{7}) \(\d{4}-\d\d-\d\d\)", opening)
    if commit is None:
        assert "was not run here" in opening
    else:
        sections.insert(2, "What was run")
        assert re.search(rf"^\| \[[^\n]*\]\({page.name}\) \| {commit[1]} \|", COMMON, re.MULTILINE), (
            "a row of the table"
        )
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == sections


def test_the_common_page_names_what_there_is() -> None:
    for name in integrations.__all__:
        assert name in COMMON


def test_the_table_counts_what_the_plans_make() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+), window (\d+) \| (\d+) \| (.*) \|$", COMMON, re.MULTILINE)
    assert len(rows) >= 8
    for steps, estimator, window, passes, cells in rows:
        count = int(steps)
        sigmas = 1 - torch.arange(count, dtype=torch.float64) / (count + 1)
        assert window_plan(sigmas, int(window), estimator).passes == int(passes)
        expected = []
        for backward in (2, 3):
            exact, ours = count * (1 + backward), int(passes) * (1 + backward)
            expected += [exact / ours, exact / (count + int(passes) * backward)]
        assert cells.split(" | ") == [f"{value:.2f}x" for value in expected]
