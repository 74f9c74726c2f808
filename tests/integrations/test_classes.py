"""Pages that add a class or function to the host: in a host of the same shape, against the host's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.plans import Plan
from tests.integrations.hosts import CLASS_HOSTS
from tests.integrations.network import Names
from tests.integrations.test_hosts import SAME, blocks
from tests.integrations.verl import WINDOW, verl_config, verl_train

each_page = pytest.mark.parametrize("page", CLASS_HOSTS)


def from_page(page: str, monkeypatch: pytest.MonkeyPatch, plan_for: Callable[[Tensor], Plan] | None = None) -> Any:
    """The page's class, and the reports of its updates; with another plan than the page's if one is given."""
    host, reports = CLASS_HOSTS[page], []
    for name, module in host.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    names: Names = {}
    exec(compile(blocks(page)["once"], f"{page}.md: once", "exec"), names)
    if plan_for is not None:
        names["window_plan"] = lambda sigmas, window, estimator="causal": plan_for(sigmas)
    plan_update = names["plan_update"]

    def watched(*arguments: Any, **settings: Any) -> Any:
        reports.append(plan_update(*arguments, **settings))
        return reports[-1]

    names["plan_update"] = watched
    return names[host.name], reports


def weights(names: Names) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in names["network"].parameters() if p.requires_grad])


@pytest.mark.parametrize("plan", SAME)
@pytest.mark.parametrize("steps_per_rollout", [1, 2])
@each_page
def test_weights_and_figures_are_those_of_the_hosts_own_class(
    page: str, steps_per_rollout: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = CLASS_HOSTS[page].train
    own = train(None, torch.float64, steps_per_rollout, 3)
    made, reports = from_page(page, monkeypatch, SAME[plan])
    ours = train(made, torch.float64, steps_per_rollout, 3)
    start = weights(train(None, torch.float64, 1, 0))
    assert (weights(ours) - weights(own)).norm() < 1e-6 * (weights(own) - start).norm()
    assert len(ours["optimizer_steps"]) == len(own["optimizer_steps"]) == 3 * steps_per_rollout
    on_policy = 4 // steps_per_rollout if CLASS_HOSTS[page].keeps_means else 0
    assert [report.upstream for report in reports] == (["closed_form"] * on_policy + ["autograd"] * (4 - on_policy)) * 3
    assert any(report.clipped_share > 0 for report in reports) == (steps_per_rollout > 1), "clips after a step"
    for found, expected in zip(ours["metrics"], own["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@each_page
def test_in_fp32_too(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = CLASS_HOSTS[page].train
    own = train(None, torch.float32, 1, 3)
    made, _ = from_page(page, monkeypatch, SAME["jagg, window 2"])
    torch.testing.assert_close(weights(train(made, torch.float32, 1, 3)), weights(own), rtol=1e-5, atol=1e-5)


@each_page
def test_the_pages_own_plan_makes_a_pass_per_window(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = CLASS_HOSTS[page]
    made, reports = from_page(page, monkeypatch)
    names = host.train(made, torch.float64, 1, 2)
    assert [report.passes for report in reports] == [host.passes] * 8
    assert [report.forwards for report in reports] == [host.passes if host.keeps_means else host.steps] * 8
    assert len(names["optimizer_steps"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_kl_loss": True}, "a plan has no use_kl_loss"),
        ({"use_distill_loss": True}, "a plan has no use_distill_loss"),
        ({"loss_mode": "flow_dppo"}, "a plan has no diffusion_loss.loss_mode=flow_dppo"),
        ({"loss_mode": "grpo_guard"}, "a plan has no diffusion_loss.loss_mode=grpo_guard"),
        ({"rollout_is_weights": torch.ones(8, WINDOW)}, "a plan has no rollout_is_weights"),
    ],
)
def test_what_verl_omni_has_beyond_a_plan_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reports = from_page("verl-omni", monkeypatch)
    config = verl_config(**{key: value for key, value in changes.items() if key.startswith("use")})
    config.diffusion_loss.loss_mode = changes.get("loss_mode", "flow_grpo")
    extra = {key: value for key, value in changes.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=message):
        verl_train(made, torch.float64, 1, 1, config, **extra)
    assert reports == []


@pytest.mark.parametrize("given", [{"beta": 0.1}, {"aggregate_logprobs_per_sample": True}])
def test_what_nemo_rl_has_beyond_a_plan_is_refused(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made, reports = from_page("nemo-rl", monkeypatch)
    with pytest.raises(ValueError, match="a plan has no beta and no aggregate_logprobs_per_sample"):
        CLASS_HOSTS["nemo-rl"].train(made, torch.float64, 1, 1, **given)
    assert reports == []
