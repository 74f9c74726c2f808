"""Peak memory of collecting, each space in a fresh process (the peak of a process never falls)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from analysis.measure.cross_table import SpaceName, collect_table
from jagg_core import ClippedSurrogate, dance_schedule
from jagg_core.rollouts import rollout
from jagg_core.transitions import DanceSDE

ROOT = Path(__file__).resolve().parents[2]
SIDE, LAYERS = 4096, 4
PAIRS = 5
"""Backwards at three steps: each serves itself, and all but the last the next one."""
GRADIENT_BYTES = LAYERS * SIDE**2 * 4
"""256 MiB, in four tensors."""

ALLOWANCE_BYTES = 40 * 2**20
"""For activations (16 KiB a layer), the projected rows (5 of 256 KiB), the table of signs (4 MiB, drawn as int64) and
pages of libraries that are first touched by a backward."""


class WideField(nn.Module):
    """Matrices that multiply one vector: a forward without large activations."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        size = (SIDE, SIDE)
        self.matrices = nn.ParameterList(torch.empty(size).uniform_(-0.02, 0.02, generator=draw) for _ in range(LAYERS))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        x = latents + sigma[:, None]
        for matrix in self.matrices:
            x = torch.tanh(nn.functional.linear(x, matrix))
        return x


def memory_bytes(key: str) -> int:
    """Of this process, as Linux counts it. ``ru_maxrss`` would start from what the parent process had at the start."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(space: SpaceName) -> int:
    """Bytes that collecting needed at most beyond the model and a rollout."""
    torch.set_num_threads(1)
    field = WideField()
    trajectory = rollout(field, dance_schedule(4), DanceSDE(0.7), torch.randn(1, SIDE), 3)
    before = memory_bytes("VmRSS")
    table = collect_table(
        field, trajectory, torch.ones(1), ClippedSurrogate(), past=1, future=0, space=space, dimension=2**16
    )
    assert len(table.pairs) == PAIRS
    assert table.gram.diagonal().min() > 0
    return memory_bytes("VmHWM") - before


def peak_bytes(space: SpaceName) -> int:
    """`measure` in a process of its own."""
    command = [
        sys.executable,
        "-c",
        f"from tests.analysis.test_collect_memory import measure; print(measure({space!r}))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=200)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.timeout(450)  # more than both processes may take
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounts of memory")
def test_projecting_never_holds_more_than_two_gradients() -> None:
    limit = 2 * GRADIENT_BYTES + ALLOWANCE_BYTES
    projected = peak_bytes("projected")
    assert GRADIENT_BYTES < projected < limit
    assert peak_bytes("exact") > PAIRS * GRADIENT_BYTES > limit, "so that the limit can be broken"
