"""Files of a report: tables as CSV, figures as PNG and SVG, one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from analysis.report import figures
from analysis.report.blocks import Block
from analysis.report.digits import rounded
from jagg_core.files import write_atomically
from jagg_core.records import Record


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
    template: str,
    *,
    record: Record | None = None,
    shown: Mapping[str, pd.DataFrame],
    blocks: Sequence[Block] = (),
    drawn: Sequence[Mapping[str, Figure]] = (),
    pictures: Mapping[str, str],
    **values: Any,
) -> str:
    """Renders a page.

    Args:
        template: its file.
        record: which it is of; None for pages of training runs.
        shown: its short tables, by name.
        blocks: its parts in order.
        drawn: figures of every block, by the name of the file.
        pictures: all figures as data, by the same names.
        values: what else the template uses.
    """
    environment = Environment(loader=PackageLoader("analysis.report"), autoescape=True, undefined=StrictUndefined)
    tables = {name: frame.to_html(index=False, border=0, escape=True) for name, frame in shown.items()}
    parts = []
    for block, figures_of in zip(blocks, drawn, strict=True):
        if block.table in tables or figures_of:
            texts = {n: environment.from_string(getattr(block, n)).render(record=record) for n in ("before", "note")}
            parts.append(
                {
                    "title": block.title,
                    "table": tables.get(block.table, ""),
                    "pictures": {name: pictures[name] for name in figures_of},
                    "folded": block.folded,
                    "opened": block.opened,
                    **texts,
                }
            )
    return environment.get_template(template).render(
        tables=tables, blocks=parts, record=record, pictures=pictures, **values
    )


def data_uri(png: bytes) -> str:
    """A picture inside a page."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
