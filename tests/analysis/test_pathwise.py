"""The bias of causal plans by pathwise gradients: a known answer, the score function as a check, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.__main__ import main
from analysis.measure.calibrate import run
from analysis.measure.estimators import NamedPlan, exact, with_knots
from analysis.measure.pathwise import pathwise_plans, pathwise_reward, pathwise_rows, slopes_of
from analysis.measure.rollouts import Batch, make_batch
from analysis.measure.signal_gradients import bank_rows
from analysis.measure.study import LEAST_SAMPLES, Recipe
from analysis.report.fidelity.direction import decisive, pathwise
from analysis.report.fidelity.signal_tables import signal
from analysis.report.write import write_report
from analysis.statistics.direction import direction_cosine, direction_lost, signal_share
from analysis.statistics.learning_signal import products
from analysis.statistics.names import PER_PROMPT
from jagg_core import ClippedSurrogate, DanceSDE, group_advantages
from jagg_core.advantages import advantage_slopes
from jagg_core.backbones import load_backbone
from jagg_core.records import Record
from jagg_core.rewards import differentiable, load_reward
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import weights_version
from tests.analysis.test_calibrate import not_ok, small
from tests.backbones.stub import StubBackbone
from tests.jagg_core.fields import MlpField
from tests.jagg_core.test_pathwise import bend, expected_products, with_noise

DIMENSION = 512
"""More than the fields have parameters: inner products are exact."""

OBJECTIVE = ClippedSurrogate(adv_clip=100.0)
CENTRED = {"centre": "prompt", "scale": "none"}


def coarse(images: Tensor, prompts: list[str]) -> Tensor:
    """A reward without gradient."""
    return (10 * images.mean((1, 2, 3))).detach().round()


def broken(images: Tensor, prompts: list[str]) -> Tensor:
    """A reward that is finite, and its gradient is not."""
    return images.mean((1, 2, 3)) + (0 * images.mean((1, 2, 3))).sqrt()


# A known answer


@pytest.fixture(scope="module")
def known() -> float:
    """What one pass at the first of three steps loses of the direction, by quadrature of the score function."""
    scores = {
        key: score
        for key, (score, _) in expected_products(
            DanceSDE(0.7),
            2,
            steps=3,
            nodes=7,
            advantages_of=lambda rewards, ids: group_advantages(rewards, ids, **CENTRED),  # type: ignore[arg-type]
            slopes=lambda rewards, ids: advantage_slopes(rewards, ids, **CENTRED),  # type: ignore[arg-type]
        ).items()
    }
    once, whole = (torch.stack([scores[knot(j), j] for j in range(3)]).sum(0) for knot in (lambda j: 0, lambda j: j))
    return 1 - float(torch.cosine_similarity(once, whole, dim=0)) ** 2


def batch_of(seed: int, groups: int) -> tuple[Batch, Callable[[Tensor], Tensor], Tensor]:
    """Groups of two samples with drawn noise, and what `pathwise_rows` needs of them."""
    field = MlpField(elements=1, samples=1, hidden=4)
    noise = torch.randn(3, 2 * groups, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    start = torch.linspace(-0.5, 0.7, 2, dtype=torch.float64).repeat(groups)[:, None]
    trajectory = with_noise(field, DanceSDE(0.7), dance_schedule(4), start, noise)
    trajectory = replace(trajectory, weights_version=weights_version(field))
    rewards, ids = bend(trajectory.final), torch.arange(2 * groups) // 2
    advantages = group_advantages(rewards, ids, **CENTRED).double()  # type: ignore[arg-type]
    batch = Batch(seed, field, trajectory, ["a"] * 2 * groups, rewards, advantages)
    return batch, bend, advantage_slopes(rewards, ids, **CENTRED)  # type: ignore[arg-type]


def two_plans(sigmas: Tensor) -> list[NamedPlan]:
    return [exact(sigmas), with_knots(sigmas, "causal", (0,))]


def test_both_estimates_hold_a_known_answer(known: float) -> None:
    plans = two_plans(dance_schedule(4)[:-2])
    pathwise_bank, score_bank = [], []
    for seed in range(60):
        batch, value, slopes = batch_of(seed, groups=32)
        made = pathwise_rows(batch, value, slopes, OBJECTIVE, plans, {"exact"}, DIMENSION, 1, 1)
        pathwise_bank.append(made.rows.numpy())
        score_bank.append(bank_rows(batch, OBJECTIVE, {PER_PROMPT: plans}, DIMENSION, 1, 1).numpy())
    reach = []
    for bank in (np.stack(pathwise_bank), np.stack(score_bank)):
        lost = direction_lost(products(bank[:, 1], bank[:, 0]))
        assert lost.value is not None and lost.low is not None and lost.high is not None
        assert lost.low <= known <= lost.high
        reach.append(lost.high - lost.low)
    assert reach[0] < 0.4 * reach[1]
    assert reach[0] < 0.5 * known
    both = np.stack(pathwise_bank)
    same = direction_cosine(products(both[:, 2], both[:, 0]))
    assert same.low is not None and same.high is not None
    assert same.low <= 1 <= same.high


def test_on_a_shipped_backbone_both_estimates_agree() -> None:
    backbone, recipe = load_backbone("digits-flux"), Recipe(steps=6, prompts=2, samples=8)
    sigmas, reward = recipe.sigmas(backbone)[:-2], load_reward("ink")
    plans = [exact(sigmas), with_knots(sigmas, "causal", (0, 3)), with_knots(sigmas, "causal", (0,))]
    pathwise_bank, score_bank = [], []
    for number in range(10):
        batch = make_batch(backbone, reward, recipe, 0.7, "pathwise", number)
        value, slopes = differentiable(reward, backbone.decode, batch.prompts), slopes_of(batch, 8, OBJECTIVE)
        made = pathwise_rows(batch, value, slopes, OBJECTIVE, plans, {"exact"}, 4096, 1, 1)
        pathwise_bank.append(made.rows.numpy())
        score_bank.append(bank_rows(batch, OBJECTIVE, {PER_PROMPT: plans}, 4096, 1, 1).numpy())
    by_pathwise, by_score = np.stack(pathwise_bank), np.stack(score_bank)
    for place in (1, 2):
        one, other = (direction_lost(products(bank[:, place], bank[:, 0])) for bank in (by_pathwise, by_score))
        assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
        assert max(one.low, other.low) <= min(one.high, other.high), (one, other)
        assert one.high - one.low < 0.3 * (other.high - other.low)
    same = direction_cosine(products(by_pathwise[:, 3], by_pathwise[:, 0]))
    assert same.low is not None and same.high is not None
    assert same.low <= 1 <= same.high
    shares = [signal_share(products(bank[:, 0], bank[:, 0])).value for bank in (by_pathwise, by_score)]
    assert shares[0] > 3 * shares[1]  # type: ignore[operator]


# Which plans, and what is refused


def test_every_number_of_passes_is_there_and_those_that_are_asked_for_are_shifted_too() -> None:
    sigmas = dance_schedule(7)[:-2]
    searched = {passes: (0, *range(7 - passes, 6)) for passes in range(1, 7)}
    plans = pathwise_plans(sigmas, {"causal": searched, "spline": searched}, shifted=(4, 2))
    assert [e.name for e in plans] == [
        "exact",
        *(f"causal-{k}" for k in (5, 4, 3, 2, 1)),
        *(f"causal-predicted-{k}" for k in (4, 2)),
    ]
    assert not any(e.anticipating for e in plans)


def test_plans_that_look_ahead_are_refused() -> None:
    batch, value, slopes = batch_of(0, groups=2)
    plans = [exact(batch.trajectory.sigmas), with_knots(batch.trajectory.sigmas, "spline", (0, 1))]
    ahead = with_knots(batch.trajectory.sigmas, "causal", (1,))
    assert ahead.anticipating
    with pytest.raises(ValueError, match=r"estimators must not look ahead .* got \['causal-1'\]"):
        pathwise_rows(batch, value, slopes, OBJECTIVE, [*plans, ahead], {"exact"}, DIMENSION, 1, 1)


def test_slopes_are_zero_where_the_advantage_is_clipped() -> None:
    batch, _, _ = batch_of(0, groups=2)
    rewards = torch.tensor([0.0, 0.0, 0.0, 9.0])
    slopes = slopes_of(replace(batch, rewards=rewards), 4, ClippedSurrogate(adv_clip=1.4))
    assert slopes[3] == 0
    assert slopes[:3].all()


class Graphless(StubBackbone):
    """Its decoder builds no graph."""

    def decode(self, latents: Tensor) -> Tensor:
        with torch.no_grad():
            return super().decode(latents)


def test_why_there_is_no_gradient_is_one_line() -> None:
    ink, other = load_reward("ink"), load_reward("tests.analysis.test_pathwise:coarse")
    assert pathwise_reward(ink, "", StubBackbone(), "cpu") == (ink, "")
    assert "has no gradient in the images" in pathwise_reward(other, "", StubBackbone(), "cpu")[1]
    assert "decode: images have no gradient" in pathwise_reward(ink, "", Graphless(), "cpu")[1]
    named, reason = pathwise_reward(other, "ink", StubBackbone(), "cpu")
    assert (named.name, reason) == ("ink", "")
    # the reward comes first where it has a gradient
    assert pathwise_reward(ink, "tests.analysis.test_pathwise:coarse", StubBackbone(), "cpu")[0] is ink


# In a calibration

Calibrated = Callable[..., Record]


@pytest.fixture
def calibrated(stub: str, tmp_path: Path) -> Calibrated:
    return lambda **changes: run(small(**changes), tmp_path / "run")


def test_the_record_holds_every_plan_and_the_norms_of_the_adjoint(calibrated: Calibrated) -> None:
    record = calibrated()
    head = record.cell("eta=0.7/pathwise")
    assert head.settings["proxy"] is False
    assert len(head.values["adjoint_norms"]) == 6
    assert min(head.values["adjoint_norms"]) > 0
    assert head.values["samples_per_batch"] == 2 * LEAST_SAMPLES  # two per prompt have no slope
    table = pathwise(record).set_index("estimator")
    assert set(table["n"]) == {4}
    assert table.loc["causal-4", "verdict"] == "no claim: too few batches"
    judged = decisive(signal(record), pathwise(record)).set_index("estimator")
    assert judged.loc["causal-3", "lost"] == table.loc["causal-3", "lost"]


def test_losses_by_pathwise_gradients_decide(calibrated: Calibrated, tmp_path: Path) -> None:
    calibrated(pathwise_batches=12, max_signal_loss=0.3)
    page, shown, sentences = write_report(tmp_path / "run")
    text = page.read_text()
    assert "What causal plans lose of the expected gradient" in text
    assert {"direction lost", "by the score function"} <= set(shown["pathwise"].columns)
    [chosen] = [one for one in sentences if "learning signal lost in an update" in one]
    assert "n = 12, by pathwise gradients" in chosen
    [lost] = [one for one in sentences if "of the direction of the expected gradient" in one]
    assert "(reward ink), n = 12 batches, 72 samples. Plans that look ahead are left out" in lost
    assert any("signal of one batch, pathwise" in one for one in sentences)


def test_a_reward_without_gradient_leaves_the_score_function(calibrated: Calibrated, tmp_path: Path) -> None:
    record = calibrated(reward="tests.analysis.test_pathwise:coarse")
    assert not_ok(record) == {}
    _, shown, sentences = write_report(tmp_path / "run")
    assert "pathwise" not in shown
    [why] = [one for one in sentences if "no pathwise gradients" in one]
    assert "losses are by the score function alone: reward" in why


def test_a_proxy_takes_the_place_of_a_reward_without_gradient(calibrated: Calibrated, tmp_path: Path) -> None:
    record = calibrated(reward="tests.analysis.test_pathwise:coarse", proxy_reward="ink", pathwise_batches=8)
    assert record.cell("eta=0.7/pathwise").settings["proxy"] is True
    _, _, sentences = write_report(tmp_path / "run")
    assert any("by pathwise gradients (proxy reward ink)" in one for one in sentences)


def test_a_proxy_without_gradient_is_refused_before_anything_runs(calibrated: Calibrated, tmp_path: Path) -> None:
    name = "tests.analysis.test_pathwise:coarse"
    with pytest.raises(ValueError, match=f"^proxy_reward must be differentiable, got {name}: reward .* no gradient"):
        calibrated(reward=name, proxy_reward=name)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_fails_its_cell_alone(calibrated: Calibrated) -> None:
    record = calibrated(reward="tests.analysis.test_pathwise:broken")
    reason = "FloatingPointError: the reward's gradient is not finite at the final samples"
    assert not_ok(record) == {"eta=0.7/pathwise": reason}
    assert record.cell("eta=0.7/times").status == "ok"


def test_none_are_measured_if_none_are_wanted(calibrated: Calibrated) -> None:
    assert not [c for c in calibrated(pathwise_batches=0).cells if "pathwise" in c.name]


def test_an_unknown_proxy_is_refused_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--backbone", "digits-flux", "--proxy-reward", "inkk", "--out", str(tmp_path / "run")])
    assert "unknown reward 'inkk'" in capsys.readouterr().err
