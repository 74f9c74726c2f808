"""What DanceGRPO and MixGRPO have beyond a gradient: figures for their logs, modes, settings that a plan refuses."""

from __future__ import annotations

import re

import pytest
import torch

from jagg_core.trajectory import ReplayMismatch
from tests.integrations.hosts import HOSTS
from tests.integrations.network import Names
from tests.integrations.test_hosts import DOCS, SAME, blocks, from_page, train

LOGGED = {
    "dancegrpo": ["total_loss"],
    "mixgrpo": ["total_loss", "policy_total_loss", "kl_total_loss", "total_clip_frac"],
}


@pytest.mark.parametrize("name", LOGGED)
def test_what_a_host_logs_is_what_its_loop_logs(name: str) -> None:
    """Four optimizer steps per rollout and steps long enough to clip some."""
    host, found = HOSTS[name], {}
    for plan in ("own", "exact"):
        names = host.names(torch.float64, 4)
        names["args"].clip_range = 1e-4
        if name == "mixgrpo":
            names["args"].kl_coeff = 100.0
        train(host, names, host.own if plan == "own" else from_page(host, names, SAME["exact"]), 2)
        found[plan] = [names["logged"][key] for key in LOGGED[name]]
    assert all(value != 0 for value in found["own"])
    assert found["exact"] == pytest.approx(found["own"], rel=1e-5)


@pytest.mark.parametrize("name", LOGGED)
def test_the_rollout_runs_in_eval_mode_and_the_update_in_train_mode(name: str) -> None:
    host = HOSTS[name]
    names = host.names(torch.float64, 1)
    inner = from_page(host, names, None)
    modes: list[bool] = []
    names["network"].register_forward_pre_hook(lambda module, _: modes.append(module.training))

    def noted(names: Names) -> None:
        start = len(modes)
        assert names["i"] or not any(modes), "the rollout"
        inner(names)
        assert modes[start:] and all(modes[start:])

    train(host, names, noted, 1)


@pytest.mark.parametrize("plan", SAME)
@pytest.mark.parametrize("name", LOGGED)
def test_a_network_in_bf16_trains_as_in_the_loop(name: str, plan: str) -> None:
    """fp32 weights under autocast: what the network gives is bf16, and all that follows it is not."""
    host, weights = HOSTS[name], {}
    for way in ("before", "own", "page"):
        names = host.names(torch.float32, 2)
        names["network"].register_forward_hook(lambda *call: (call[-1][0].bfloat16(),))
        inner = from_page(host, names, SAME[plan]) if way == "page" else host.own
        weights[way] = train(host, names, inner, 0 if way == "before" else 2)
    moved = (weights["own"] - weights["before"]).norm()
    assert (weights["page"] - weights["own"]).norm() < 2e-2 * moved


@pytest.mark.parametrize(("setting", "value"), [("training_strategy", "all"), ("dpm_apply_strategy", "all")])
def test_mixgrpo_refuses_what_a_plan_cannot_express(setting: str, value: object) -> None:
    names = HOSTS["mixgrpo"].names(torch.float64, 1)
    exec(blocks("mixgrpo")["once"], names)
    names["check"](names["args"])
    setattr(names["args"], setting, value)
    with pytest.raises(ValueError, match=rf"{setting} must be .*, got {value!r}"):
        names["check"](names["args"])
    assert re.search(r"@@ train_one_step, first line\n\+    check\(args\)", (DOCS / "mixgrpo.md").read_text())


def test_another_convention_of_the_log_probability_is_refused() -> None:
    """Before 2025-08-20 DanceGRPO's had no normalising term, as MixGRPO's Dance step still has none."""
    host = HOSTS["dancegrpo"]
    names = host.names(torch.float64, 1)
    inner = from_page(host, names, None)

    def without(names: Names) -> None:
        names["sample"]["log_probs"] = names["sample"]["log_probs"] - 1
        inner(names)

    with pytest.raises(ReplayMismatch, match="setting normalised"):
        train(host, names, without, 1)
