"""Files of a report: tables as CSV, figures as PNG and SVG, one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from analysis.report import figures
from analysis.report.blocks import Block
from analysis.report.digits import rounded
from jagg_core.files import write_atomically
from jagg_core.records import Record

GLOSSARY = Path(__file__).resolve().parents[2] / "docs" / "README.md"
"""Holds the table of terms under the heading "Terms"."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*[%x]?(?![\w.])")
"""What a cell of a numeric column begins with."""

INTERVAL = re.compile(r"\[[^\[\]]*\d[^\[\]]*\]")

UNDEFINED = ("", "undefined", "not measured")


def write_tables_and_figures(
    run: Path, frames: Mapping[str, pd.DataFrame], made: Mapping[str, Figure]
) -> dict[str, str]:
    """Writes ``tables/*.csv`` (rounded) and ``figures/*``. Returns the figures as data for a page, by name."""
    for name, frame in frames.items():
        text = frame.map(rounded).to_csv(index=False)
        write_atomically(run / "tables" / f"{name}.csv", text.encode())
    pictures = {}
    for name, figure in made.items():
        for kind, content in figures.rendered(figure).items():
            write_atomically(run / "figures" / f"{name}.{kind}", content)
            if kind == "png":
                pictures[name] = data_uri(content)
    return pictures


def render(
    *,
    title: str,
    top: Sequence[str],
    shown: Mapping[str, pd.DataFrame],
    blocks: Sequence[Block],
    drawn: Sequence[Mapping[str, Figure]] = (),
    pictures: Mapping[str, str],
    files: Sequence[str] = (),
    record: Record | None = None,
    findings: Sequence[str] = (),
    commands: Sequence[tuple[str, str, str]] = (),
    **values: Any,
) -> str:
    """Renders a page.

    Args:
        title: heading of the page.
        top: its first lines: which plan, what it keeps, what it saves.
        shown: its short tables, by name; ``conclusions`` stands at the top, its column ``evidence`` becomes links to
            the blocks of that title.
        blocks: its parts in order.
        drawn: figures of every block, by the name of the file; none where it is empty.
        pictures: all figures as data, by the same names.
        files: names of the CSV files.
        record: which the page is of; None for pages of training runs.
        findings: sentences, folded away.
        commands: what to paste: a remark, a shell command and a line of Python.
        values: what texts and bodies of the blocks use besides ``record``.
    """
    environment = Environment(loader=PackageLoader("analysis.report"), autoescape=True, undefined=StrictUndefined)
    numbers, figure_numbers = count(1), count(1)
    drawn = drawn or [{}] * len(blocks)
    parts = [(block, some) for block, some in zip(blocks, drawn, strict=True) if _is_shown(block, shown, some)]
    conclusions = None
    if len(shown.get("conclusions", ())):
        linked = _with_links(shown["conclusions"], [block.title for block, _ in parts])
        conclusions = _table(next(numbers), linked, "Conclusions", _file("conclusions", files))
    contents = []
    for block, some in parts:
        texts = {
            name: Markup(environment.from_string(getattr(block, name)).render(record=record, **values))
            for name in ("before", "note")
        }
        table = None
        if len(shown.get(block.table, ())):
            name = _file(block.csv or block.table, files)
            table = _table(next(numbers), shown[block.table], block.caption or block.title, name)
        contents.append(
            {
                "id": anchor(block.title),
                "title": block.title,
                "body": block.body,
                "table": table,
                "figures": [
                    {
                        "number": next(figure_numbers),
                        "caption": figure.get_label() or f"{block.title}: {name.replace('_', ' ')}.",
                        "data": pictures[name],
                        "file": f"figures/{name}.svg",
                    }
                    for name, figure in some.items()
                ],
                "folded": block.folded,
                "opened": block.opened,
                **texts,
            }
        )
    return environment.get_template("page.html").render(
        title=title,
        top=top,
        conclusions=conclusions,
        commands=commands,
        blocks=contents,
        findings=findings,
        glossary=list(glossary()),
        files=files,
        record=record,
        **values,
    )


def _is_shown(block: Block, shown: Mapping[str, pd.DataFrame], drawn: Mapping[str, Figure]) -> bool:
    """A block of text is always shown, others if there is a table or a figure."""
    text_alone = not block.table and block.draw is None
    return text_alone or len(shown.get(block.table, ())) > 0 or len(drawn) > 0


def anchor(title: str) -> str:
    """Makes the identifier of a block, which links name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _file(name: str, files: Sequence[str]) -> str:
    return f"tables/{name}.csv" if name in files else ""


def _with_links(table: pd.DataFrame, titles: Sequence[str]) -> pd.DataFrame:
    def link(title: str) -> str:
        return Markup('<a href="#{}">{}</a>').format(anchor(title), title) if title in titles else title

    return table.assign(evidence=table["evidence"].map(link)) if "evidence" in table else table


def _table(number: int, frame: pd.DataFrame, caption: str, file: str) -> dict[str, Any]:
    return {"number": number, "caption": caption, "file": file, "rows": table_rows(frame)}


def table_rows(frame: pd.DataFrame) -> Markup:
    """Writes head and body of a table; columns of numbers are aligned to the right and sorted as numbers."""
    texts = [
        [cell if isinstance(cell, Markup) else _text(cell) for cell in row] for row in frame.itertuples(index=False)
    ]
    numeric = [all(cell in UNDEFINED or NUMBER.match(cell) for cell in column) for column in zip(*texts, strict=True)]
    classes = [' class="num"' if one else "" for one in numeric] or [""] * len(frame.columns)
    head = "".join(f"<th{kind}>{escape(str(name))}</th>" for kind, name in zip(classes, frame.columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>\n"
        for row in texts
    )
    return Markup(f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>")


def _text(cell: Any) -> str:
    return "" if cell is None or cell is pd.NA or cell != cell else str(cell)


def _cell(text: str) -> str:
    """Keeps intervals on one line."""
    return INTERVAL.sub(lambda match: f'<span class="interval">{match[0]}</span>', str(escape(text)))


def glossary() -> Iterator[tuple[str, Markup]]:
    """Yields the terms of the documentation with their meaning."""
    section = GLOSSARY.read_text("utf-8").partition("## Terms")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and cells[0] != "term" and not set(cells[0]) <= set("-: "):
            term, meaning = (Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(cell)))) for cell in cells)
            yield term, meaning


def data_uri(png: bytes) -> str:
    """A picture inside a page."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
