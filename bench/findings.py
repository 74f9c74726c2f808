"""What counted collectives say, in words: where one all-gather per module holds, and what deferral costs."""

from __future__ import annotations

from bench.noise import median_of
from jagg_core.records import Cell, Record


def count_lines(record: Record) -> list[str]:
    """A table of collectives per sharded unit, and the findings; nothing of a run that failed."""
    arms = _counted(record)
    if not arms:
        return []
    units, settings = record.cell("sharding").values["units"], record.settings
    where = f"{settings['layout']} on {_many(settings['ranks'], 'rank')}, {_many(units, 'unit')}"
    lines = [
        f"{where}; per unit and group of {settings['window']} steps, seconds of the slowest rank:",
        f"{'arm':<24}{'all-gathers':>12}{'reduce-scatters':>17}{'all-reduces':>13}{'MiB moved':>12}{'seconds':>10}",
    ]
    for cell in arms:
        counts, moved = cell.values["counts"], sum(cell.values["bytes"].values()) / 2**20
        gathers, scatters, reduces = (counts[kind] / units for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        line = f"{cell.name:<24}{gathers:>12g}{scatters:>17g}{reduces:>13g}{moved:>12.1f}"
        ranks = [taken for name, taken in cell.samples.items() if name.endswith("_total_s")]
        rounds = [max(t for t in turn if t is not None) for turn in zip(*ranks, strict=True)]
        lines.append(line + (f"{median_of(rounds):>10.3f}" if rounds else f"{'-':>10}"))
    return lines + list(record.cell("sharding").values["findings"])


def findings(record: Record) -> list[str]:
    """Sentences on a record of ``python -m bench collectives``; they say only what its counts show."""
    units, window = record.cell("sharding").values["units"], record.settings["window"]
    arms = _counted(record)
    if any(cell.values["counts"]["all_gather"] for cell in arms):
        found = _gathers(arms, units, window)
    else:
        found = ["no arm gathers parameters: every rank has all of them"]
    found += _reductions(arms, units)
    return found + [line for cell in arms if cell.settings["deferred"] for line in _deferral(cell, record)]


def _counted(record: Record) -> list[Cell]:
    return [cell for cell in record.cells if cell.status == "ok" and "counts" in cell.values]


def _gathers(arms: list[Cell], units: int, window: int) -> list[str]:
    alike: dict[tuple[float, float, int], list[str]] = {}
    for cell in arms:
        within = cell.values["backward_counts"]["all_gather"]
        before = cell.values["counts"]["all_gather"] - within
        alike.setdefault((before / units, within / units, cell.values["backwards"]), []).append(cell.name)
    found = []
    for (before, within, calls), names in alike.items():
        gathers, called = _many(before + within, "all-gather"), _many(calls, "backward call")
        text = f"{', '.join(names)}: {gathers} per unit with W = {window}, {before:g} in forwards and "
        text += f"{within:g} in {called}" if within else "none in backwards"
        if within > calls:
            text += (
                f"; one backward call gathers every unit {within / calls:g} times, one graph after the other: "
                "the paper's one all-gather per module does not hold"
            )
        elif before == 1 and within <= 1:
            text += ": one all-gather per module and direction holds"
        found.append(text)
    return found


def _reductions(arms: list[Cell], units: int) -> list[str]:
    found = []
    for kind, name in (("reduce_scatter", "reduce-scatters"), ("all_reduce", "all-reduces of gradients")):
        counts = {cell.name: cell.values["counts"][kind] / units for cell in arms}
        if any(counts.values()):
            found.append(f"{name} per unit: " + ", ".join(f"{arm} {count:g}" for arm, count in counts.items()))
    return found


def _deferral(cell: Cell, record: Record) -> list[str]:
    at_once = record.cell(cell.name.removesuffix("-deferred"))
    if at_once.status != "ok":
        return []
    now, then = at_once.values, cell.values
    gathers = (now["counts"]["all_gather"], then["counts"]["all_gather"])
    change = "as many" if gathers[0] == gathers[1] else f"{gathers[1]} instead of {gathers[0]}"
    reductions = [sum(values["counts"][kind] for kind in ("reduce_scatter", "all_reduce")) for values in (now, then)]
    return [
        f"{cell.name}: {_many(reductions[1], 'reduction')} of gradients instead of {reductions[0]}, "
        f"all-gathers: {change}; "
        f"a rank keeps {then['retained_gradient_bytes']} bytes of gradients meanwhile, "
        f"against {now['retained_gradient_bytes']} where they are reduced at once"
    ]


def _many(count: float, name: str) -> str:
    return f"{count:g} {name}" + ("" if count == 1 else "s")
