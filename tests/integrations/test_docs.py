"""What the pages say, where it can be checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from jagg_core import integrations
from jagg_core.integrations import window_plan
from tests.integrations.hosts import HOSTS

DOCS = Path(__file__).parents[2] / "docs" / "integrations"
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name != "README.md")
COMMON = (DOCS / "README.md").read_text()


def test_there_is_a_page_for_every_host_and_a_host_for_every_page() -> None:
    assert {page.stem for page in PAGES} == {host.page for host in HOSTS.values()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_that_its_host_was_not_run_and_what_to_expect(page: Path) -> None:
    text = page.read_text()
    assert "was not run here" in text.split("\n\n")[1]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "What to replace",
        "Settings that conflict",
        "What to expect",
    ]


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
