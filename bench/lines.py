"""What the commands print of a record: medians, speed-ups over exact, what compiling took, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.noise import Ratio, median_of, noise_findings
from bench.speed_ups import PARTS, group_speed_ups, update_speed_ups
from jagg_core.records import Cell, Record


def speed_lines(record: Record) -> list[str]:
    """Formats median time and speed-up over exact of every arm of a timed group. Empty if exact failed."""
    rows = group_speed_ups(record)
    if not rows:
        return []
    lines = [f"{row['arm']:<24}{row['total_s'] * 1000:>10.1f} ms{_interval(row['speed_up']):>24}" for row in rows]
    return [*lines, *_compile_lines(record), *noise_findings(record)]


def step_lines(record: Record) -> list[str]:
    """Returns median seconds of every arm's update, its speed-ups over exact, and seconds of the step's other parts."""
    lines = [f"{'arm':<30}{'passes':>7}{'seconds':>9}{'backward':>10}{'update':>22}{'whole step':>22}"]
    for one in update_speed_ups(record):
        ratios = f"{one['backward']:>9.2f}x{_interval(one['update']):>22}{_interval(one['step']):>22}"
        lines.append(f"{one['arm']:<30}{one['passes']:>7}{one['update_s']:>9.2f}{ratios}")
    others = [
        f"{c.name} {median_of(c.samples['total_s']):.4f} s" for c in record.cells if c.name in PARTS and c.samples
    ]
    lines += [f"besides the update: {', '.join(others)}", *_compile_lines(record)]
    return lines + noise_findings(record)


def memory_lines(record: Record) -> list[str]:
    """Formats the peak of every arm that was measured."""
    peaks = {cell.name: median_of(cell.samples["peak_bytes"]) for cell in record.cells if cell.status == "ok"}
    return [f"{name:<24}{peak / 2**20:>10.1f} MiB beyond model and gradients" for name, peak in peaks.items()]


def failure_lines(cells: Sequence[Cell]) -> list[str]:
    """Formats a line per reason for which cells failed, with the names of those cells."""
    failed: dict[str | None, list[str]] = {}
    for cell in cells:
        if cell.status == "failed":
            failed.setdefault(cell.reason, []).append(cell.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in failed.items()]


def count_lines(record: Record) -> list[str]:
    """Tabulates collectives per sharded unit, and adds the sentences; empty for a run that failed."""
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


def count_sentences(record: Record) -> list[str]:
    """Writes sentences on a record of ``python -m bench collectives``; they say only what its counts show."""
    units, window = record.cell("sharding").values["units"], record.settings["window"]
    arms = _counted(record)
    if any(cell.values["counts"]["all_gather"] for cell in arms):
        sentences = _gathers(arms, units, window)
    else:
        sentences = ["no arm gathers parameters: every rank has all of them"]
    sentences += _reductions(arms, units)
    return sentences + [line for cell in arms if cell.settings["deferred"] for line in _deferral(cell, record)]


def _counted(record: Record) -> list[Cell]:
    return [cell for cell in record.cells if cell.status == "ok" and "counts" in cell.values]


def _gathers(arms: list[Cell], units: int, window: int) -> list[str]:
    alike: dict[tuple[float, float, int], list[str]] = {}
    for cell in arms:
        within = cell.values["backward_counts"]["all_gather"]
        before = cell.values["counts"]["all_gather"] - within
        alike.setdefault((before / units, within / units, cell.values["backwards"]), []).append(cell.name)
    sentences = []
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
        sentences.append(text)
    return sentences


def _reductions(arms: list[Cell], units: int) -> list[str]:
    sentences = []
    for kind, name in (("reduce_scatter", "reduce-scatters"), ("all_reduce", "all-reduces of gradients")):
        counts = {cell.name: cell.values["counts"][kind] / units for cell in arms}
        if any(counts.values()):
            sentences.append(f"{name} per unit: " + ", ".join(f"{arm} {count:g}" for arm, count in counts.items()))
    return sentences


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


def _compile_lines(record: Record) -> list[str]:
    seconds = sum(cell.values.get("compile_s", 0.0) for cell in record.cells)
    return [f"torch.compile took {seconds:.1f} s before the rounds, which are without it"] if seconds > 0 else []


def _interval(ratio: Ratio) -> str:
    return "-" if ratio.value is None else f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


LINES = {"group": speed_lines, "update": step_lines, "memory": memory_lines, "collectives": count_lines}
"""Formats a cell of a preset, by its kind."""
