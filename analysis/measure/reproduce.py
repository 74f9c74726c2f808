"""The main job: how every estimator compares with the exact gradient on a trained model, and what it costs.

Computes and stores; `analysis.report.write` draws from what is stored.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from analysis.measure import shipped
from analysis.measure.estimators import NamedPlan
from analysis.measure.job import Job
from analysis.measure.study import Reproduce
from jagg_core.environment import command_line
from jagg_core.records import Cell, Record, recorded

OUTPUTS = (
    "record.json",
    "speed-*.json",
    "calibration-*.json",
    "report.html",
    "samples.png",
    "tables/*.csv",
    "figures/*.png",
    "figures/*.svg",
)
"""What a run folder holds."""


def run(settings: Reproduce, out: Path) -> Record:
    """Runs the job and writes ``out/record.json`` and one ``out/speed-NAME.json`` per timed backbone.

    Every cell that fails is recorded as failed, the others still run. A run that ``out`` already holds is replaced: its
    files go before the first new one is written, so that a run that is killed leaves no mixture. Returns the record.

    Raises:
        NotReproducible: the exact gradient differs from itself.
    """
    job = Job(settings, out, "reproduce")
    for pattern in OUTPUTS:
        for old in out.glob(pattern):
            old.unlink()
    job.check_reference(settings.etas[0])
    time_groups(settings, out)
    for eta in settings.etas:
        knots = job.search_knots(eta)
        if knots is not None:
            job.evaluate(eta, knots, _shipped_plans(job, eta))
            with recorded(job.record.cells, f"eta={eta:g}/side-by-side", eta=eta) as cell:
                cell.values = {"rows": shipped.side_by_side(eta, job.sigmas, settings.made_with(eta))}
            if eta == settings.etas[0]:
                job.test_leak(eta, knots, settings.leak_batches)
    job.contact_sheet()
    return job.record


def _shipped_plans(job: Job, eta: float) -> list[NamedPlan]:
    """Reads the plans of the calibration that comes with the project; what it recommends goes into the record."""
    plans: list[NamedPlan] = []
    cells: list[Cell] = []
    with recorded(cells, f"eta={eta:g}/shipped", eta=eta) as cell:
        calibrated = shipped.read(job.backbone.name, eta, job.sigmas, job.settings.made_with(eta))
        if calibrated is None:
            return []
        plans = shipped.estimators(calibrated, job.sigmas)
        cell.values = {key: calibrated.get(key, {}) for key in ("recommended", "seeds")}
    job.record.cells += cells
    return plans


def time_groups(settings: Reproduce, out: Path) -> None:
    """Times one group of steps, each backbone in a process that has nothing else, so that nothing else disturbs it."""
    for name in dict.fromkeys((settings.backbone, *settings.speed_backbones)):
        target = out / f"speed-{name}.json"
        command = [sys.executable, "-m", "bench", "group", "--backbone", name, "--out", str(target)]
        for flag, value in (
            ("rounds", settings.speed_rounds),
            ("batch", settings.speed_batch if name in settings.speed_backbones else settings.recipe.batch),
            ("window", settings.speed_window),
            ("eta", settings.etas[0]),
            ("steps", settings.recipe.steps),
            ("shift", settings.recipe.shift),
            ("device", settings.device),
            ("dtype", settings.dtype),
            ("seed", settings.recipe.seed),
        ):
            command += [f"--{flag}", str(value)]
        if name == settings.backbone:
            command += ["--schedule", settings.recipe.schedule]
            if settings.recipe.guidance is not None:
                command += ["--guidance", str(settings.recipe.guidance)]
            if settings.backbone_options:
                command += ["--backbone-options", *settings.backbone_options]
        # the child has the folder's lock too: if this process is killed, no other run begins before the child's end
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, close_fds=False)
        if not target.exists():
            cells = [Cell("speed", "failed", f"python -m bench group ended with exit code {done.returncode}")]
            Record("group-speed", command_line(), name, {}, {}, cells=cells).write(target)
