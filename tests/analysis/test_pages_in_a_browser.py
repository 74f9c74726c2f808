"""Pages in headless Chromium: no error, tables sort, filter and unfold, nothing is cut, and nothing is fetched."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.report.blocks import Block
from analysis.report.page import render

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
PAGES = sorted(REFERENCE.glob("*/report.html"))
WIDTH = 1000

EXAMINE = """
<script>
for (const part of document.querySelectorAll("details")) part.open = true;
const cut = [...document.querySelectorAll("body *")].filter((part) => part.scrollWidth > part.clientWidth + 1
  && part.clientWidth > 0 && getComputedStyle(part).display !== "inline");
const table = [...document.querySelectorAll("table.data")].find((one) => one.tBodies[0].rows.length > 1);
const column = table ? [...table.tHead.rows[0].cells].findLastIndex((one) => one.classList.contains("num")) : -1;
const shown = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
const values = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
const click = () => { table.tHead.rows[0].cells[column].firstElementChild.click(); return values(); };
const found = {
  width: document.documentElement.scrollWidth,
  cut: cut.map((part) => `${part.tagName}.${part.className} ${part.id} ${part.textContent.slice(0, 60)}`),
  broken: [...document.images].filter((image) => !image.naturalWidth || !image.alt).length,
  unknown: [...document.querySelectorAll('a[href^="#"]')].map((a) => a.hash.slice(1))
    .filter((id) => !document.getElementById(id)),
  copies: document.querySelectorAll(".command button").length - document.querySelectorAll(".command").length,
};
if (column >= 0) {
  Object.assign(found, { up: click(), down: click(), first: shown().length });
  const input = document.querySelector(".tools input");
  if (input) {
    input.value = "no such row";
    input.dispatchEvent(new Event("input"));
    found.filtered = [...input.closest("details, body").querySelectorAll("table.data tbody tr")]
      .filter((row) => !row.hidden).length;
  }
}
document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(found) }));
</script>
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def examined(page: str, folder: Path) -> dict[str, Any]:
    """Opens a page that examines itself. Returns what it found."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", EXAMINE + "</body>"), "utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--window-size={WIDTH},800", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    run = subprocess.run([str(CHROMIUM), *options, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert [line for line in run.stderr.splitlines() if "CONSOLE" in line] == []
    [found] = re.findall(r"<pre>(\{.*\})</pre>", run.stdout, re.DOTALL)
    return json.loads(html.unescape(found))  # type: ignore[no-any-return]


def test_a_table_sorts_by_number_filters_and_unfolds(tmp_path: Path) -> None:
    values = [f"{value:+.1e} [0, {value}]" for value in range(-10, 10)] + ["undefined"]
    table = pd.DataFrame({"estimator": [f"<plan {n}>" for n in range(21)], "value": values})
    blocks = [Block("Values", "values", opened=True), Block("Text", before="of {{ about }}")]
    commands = [("# what", "python -m jagg_core train " + "--option value " * 40, "Plan.of()")]
    page = render(
        title="A page",
        top=["one <line>"],
        shown={"values": table.sample(frac=1, random_state=0)},
        blocks=blocks,
        pictures={},
        files=["values"],
        commands=commands,
        about="this",
    )
    found = examined(page, tmp_path)
    assert found["up"] == values and found["down"] == [*values[-2::-1], "undefined"]
    assert found["first"] == 12 and found["filtered"] == 0 and found["width"] <= WIDTH
    assert (found["cut"], found["unknown"], found["copies"]) == ([], [], 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_a_stored_page(page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text) < 2e6
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#|tables/|figures/)[^"']*""", text)
    found = examined(text, tmp_path)
    assert (found["cut"], found["unknown"], found["broken"], found["copies"]) == ([], [], 0, 0)
    assert found["width"] <= WIDTH
    links = re.findall(r'href="((?:tables|figures)/[^"]+)"', text)
    assert links and not [link for link in links if not (page.parent / link).exists()]
