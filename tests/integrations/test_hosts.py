"""Every page's code in a loop of its host's shape, against that loop's own; through the real Accelerate, where used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.integrations import window_plan
from jagg_core.plans import Plan, exact_plan, jagg_plan
from tests.integrations.hosts import HOSTS, Host
from tests.integrations.network import Inner, Names

DOCS = Path(__file__).parents[2] / "docs" / "integrations"
BLOCK = re.compile(r"<!-- ([^\n]*?) -->\n```python\n(.*?)```", re.DOTALL)

SAME = {"exact": exact_plan, "jagg, window 2": lambda sigmas: jagg_plan(sigmas, 2, 1.0)}
"""Plans that are the loop's own gradient."""

each_host = pytest.mark.parametrize("name", HOSTS)


def blocks(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((DOCS / f"{page}.md").read_text()))


def from_page(host: Host, names: Names, plan_for: Callable[[Tensor], Plan] | None) -> Inner:
    """The page's blocks, run in the host's names; with another plan than the page's if one is given."""
    found = {title: compile(code, f"{host.page}.md: {title}", "exec") for title, code in blocks(host.page).items()}
    for title in ("once", f"once: {host.variant}"):
        if title in found:
            exec(found[title], names)
    if plan_for is not None:
        names["plan_for"] = plan_for
    names["after_rollout"] = lambda names: exec(found["after the rollout"], names)
    names["reports"] = []

    def inner(names: Names) -> None:
        exec(found["in place of the loop"], names)
        names["reports"].append(names["report"])

    return inner


def train(host: Host, names: Names, inner: Inner, epochs: int) -> Tensor:
    """The weights after some epochs."""
    names.setdefault("after_rollout", lambda names: None)
    for seed in range(epochs):
        host.epoch(names, inner, seed)
    return torch.cat([p.detach().flatten().double() for p in names["network"].parameters() if p.requires_grad])


@pytest.mark.parametrize("plan", SAME)
@pytest.mark.parametrize("steps_per_rollout", [1, 2])
@each_host
def test_the_weights_are_the_loops_own(name: str, steps_per_rollout: int, plan: str) -> None:
    host, epochs = HOSTS[name], 3 if steps_per_rollout == 1 else 2
    own = host.names(torch.float64, steps_per_rollout)
    before = torch.cat([p.detach().flatten() for p in own["network"].parameters() if p.requires_grad])
    expected = train(host, own, host.own, epochs)
    moved = (expected - before).norm()
    assert moved > 1e-3 * before.norm(), "the loop trains"
    ours = host.names(torch.float64, steps_per_rollout)
    found = train(host, ours, from_page(host, ours, SAME[plan]), epochs)
    assert len(ours["optimizer_steps"]) == len(own["optimizer_steps"]) == epochs * steps_per_rollout
    assert (found - expected).norm() < 1e-6 * moved
    upstream = [report.upstream for report in ours["reports"]]
    after_a_step = ["closed_form"] * 4 if steps_per_rollout == 1 else ["closed_form"] * 2 + ["autograd"] * 2
    assert upstream == after_a_step * epochs


@each_host
def test_in_fp32_too(name: str) -> None:
    host = HOSTS[name]
    own = host.names(torch.float32, 1)
    expected = train(host, own, host.own, 3)
    ours = host.names(torch.float32, 1)
    found = train(host, ours, from_page(host, ours, SAME["jagg, window 2"]), 3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@each_host
def test_a_causal_plan_makes_its_passes_and_steps_as_often(name: str) -> None:
    """On policy: forwards with a graph at the knots, and no other of the policy."""
    host = HOSTS[name]
    names = host.names(torch.float64, 1)
    inner = from_page(host, names, lambda sigmas: window_plan(sigmas, 2))
    backwards: list[int] = []
    if "accelerator" in names:
        own_backward = names["accelerator"].backward

        def counted(loss: Tensor, **settings: Any) -> None:
            backwards.append(1)
            own_backward(loss, **settings)

        names["accelerator"].backward = counted
    forwards: list[tuple[int, int]] = []

    def watched(names: Names) -> None:
        start = len(names["network"].graphs)
        inner(names)
        graphs = names["network"].graphs[start:]
        forwards.append((sum(graphs), len(graphs) - sum(graphs)))

    train(host, names, watched, 2)
    passes = -(-host.steps // 2)
    reference = host.steps if name.endswith("kl") else 0
    assert forwards == [(passes, reference)] * 8
    assert [r.passes for r in names["reports"]] == [r.backward_calls for r in names["reports"]] == [passes] * 8
    assert len(names["optimizer_steps"]) == 2
    if "accelerator" in names:
        assert len(backwards) == 8 * passes


@each_host
def test_the_pages_own_plan_runs(name: str) -> None:
    host = HOSTS[name]
    names = host.names(torch.float64, 2)
    train(host, names, from_page(host, names, None), 2)
    assert all(report.passes < host.steps for report in names["reports"] if report.upstream == "closed_form")
    assert len(names["optimizer_steps"]) == 4
