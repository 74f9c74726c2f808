"""What the commands say of a record: medians, speed-ups over exact, what compiling took, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.findings import count_lines
from bench.noise import Ratio, median_of, noise_findings
from bench.speed_ups import PARTS, group_speed_ups, update_speed_ups
from jagg_core.records import Cell, Record


def speed_lines(record: Record) -> list[str]:
    """Median time and speed-up over exact of every arm of a group that was timed. Empty if exact failed."""
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
    said = [*lines, f"beside the update: {', '.join(others)}", *_compile_lines(record)]
    return said + noise_findings(record)


def memory_lines(record: Record) -> list[str]:
    """Peak of every arm that was measured."""
    peaks = {cell.name: median_of(cell.samples["peak_bytes"]) for cell in record.cells if cell.status == "ok"}
    return [f"{name:<24}{peak / 2**20:>10.1f} MiB beyond model and gradients" for name, peak in peaks.items()]


def failure_lines(cells: Sequence[Cell]) -> list[str]:
    """A line per reason for which cells failed, with the names of those cells."""
    failed: dict[str | None, list[str]] = {}
    for cell in cells:
        if cell.status == "failed":
            failed.setdefault(cell.reason, []).append(cell.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in failed.items()]


def _compile_lines(record: Record) -> list[str]:
    seconds = sum(cell.values.get("compile_s", 0.0) for cell in record.cells)
    return [f"torch.compile took {seconds:.1f} s before the rounds, which are without it"] if seconds > 0 else []


def _interval(ratio: Ratio) -> str:
    return "-" if ratio.value is None else f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


LINES = {"group": speed_lines, "update": step_lines, "memory": memory_lines, "collectives": count_lines}
"""What is said of a cell of a preset, by its kind."""
