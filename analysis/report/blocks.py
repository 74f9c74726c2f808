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

    It is shown if its short table has rows or a figure was drawn. Text may use ``record`` as a template does.

    Attributes:
        title: heading.
        table: name of its short table; empty if it has none.
        draw: makes its figures from the record and the tables, by the name of the file; empty where nothing is defined.
        before: text above figures and table.
        note: caption below them.
        folded: whether the table is folded away.
        opened: whether the block is shown unfolded.
    """

    title: str
    table: str = ""
    draw: Draw | None = None
    before: str = ""
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
