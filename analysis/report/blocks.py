"""Blocks of a page: each a title, figures, a short table and a note, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from jagg_core.records import Record

Frames = Mapping[str, pd.DataFrame]
Draw = Callable[[Record, Frames], dict[str, Figure]]


@dataclass(frozen=True)
class Block:
    """Describes one part of a page.

    It is shown if its short table has rows or a figure was drawn, or if it has neither and is text alone. Text may use
    ``record`` and the other values of `analysis.report.page.render` as a template does. The caption of a figure, which
    is its alternative text too, is its label (`Figure.set_label`): a sentence that says what is seen.

    Attributes:
        title: heading.
        table: name of its short table; empty if it has none.
        draw: makes its figures from the record and the tables, by the name of the file; empty where nothing is defined.
        caption: of its table; its title if empty.
        csv: name of the CSV file of its table, if that is another.
        before: text above figures and table.
        body: template below the figures; empty if it has none.
        note: text below them.
        folded: whether the table is folded away.
        opened: whether the block is shown unfolded.
    """

    title: str
    table: str = ""
    draw: Draw | None = None
    before: str = ""
    body: str = ""
    caption: str = ""
    csv: str = ""
    note: str = ""
    folded: bool = False
    opened: bool = False


def draw_blocks(blocks: Sequence[Block], record: Record, frames: Frames) -> list[dict[str, Figure]]:
    """Draws the figures of every block, by the name of the file."""
    return [{} if block.draw is None else block.draw(record, frames) for block in blocks]


def drawn_from(table: str, name: str, figure: Callable[[Record, pd.DataFrame], Figure]) -> Draw:
    """Makes a ``draw`` of one figure from one table, which draws nothing where the table has no rows."""

    def draw(record: Record, frames: Frames) -> dict[str, Figure]:
        return {name: figure(record, frames[table])} if len(frames.get(table, ())) else {}

    return draw


def all_figures(drawn: Sequence[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Collects the figures of all blocks, by the name of the file."""
    return {name: figure for figures in drawn for name, figure in figures.items()}


def written(frames: Frames) -> list[str]:
    """Lists the tables that have rows, by the name of the file."""
    return sorted(name for name, frame in frames.items() if len(frame))


QUESTIONS = ("Which plan?", "What does it keep?", "What does it save?", "Caution")
"""What the table of conclusions of a page answers."""


def answers_table(answers: Sequence[str], evidence: Sequence[str]) -> pd.DataFrame:
    """Makes a table of conclusions from one answer to each of the first `QUESTIONS`; empty answers are left out.

    ``evidence``: titles of the blocks that the answers rest on.
    """
    rows = [row for row in zip(QUESTIONS, answers, evidence, strict=False) if row[1]]
    return pd.DataFrame(rows, columns=["question", "answer", "evidence"])
