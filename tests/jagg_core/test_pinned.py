"""Pinned gradients: one small seeded case per constructor and kernel, so that no change is silent.

A difference here is not an error by itself. Whoever means to change a number changes it here, and says why.
"""

from __future__ import annotations

import pytest

from jagg_core.objective import ClippedSurrogate
from tests.jagg_core.fields import ADVANTAGES, PLANS, MlpField, gradient, make_rollout
from tests.jagg_core.literal import KERNEL_IDS, KERNELS

PINNED = [
    # plan, kernel, gradient norm, first element of the gradient
    ("exact", "dance", 3.12748352226, -0.0677430330552),
    ("exact", "flow", 2.43154995786, 0.0274340260022),
    ("exact", "cps", 0.932035961938, 0.00376563341845),
    ("jagg", "dance", 3.14481973224, -0.0610922252788),
    ("jagg", "flow", 2.48092816704, 0.0359738323015),
    ("jagg", "cps", 0.992242615444, 0.0205892929044),
    ("jagg-routed", "dance", 3.1300133161, -0.0677784533496),
    ("jagg-routed", "flow", 2.4478738415, 0.0263151088956),
    ("jagg-routed", "cps", 0.963075007956, -0.00259732534353),
    ("jagg-index", "dance", 3.12728465864, -0.0666356607616),
    ("jagg-index", "flow", 2.42915603336, 0.02241797485),
    ("jagg-index", "cps", 0.919242032616, -0.0164934541026),
    ("endpoint", "dance", 2.0592830265, -0.0553687780645),
    ("endpoint", "flow", 1.80692392571, 0.0234356391244),
    ("endpoint", "cps", 0.644141535349, 0.0140226989577),
    ("subsample", "dance", 5.64027614469, -0.0979125360773),
    ("subsample", "flow", 5.3017829597, 0.110351364835),
    ("subsample", "cps", 1.65112251823, 0.110707414532),
    ("spline", "dance", 3.1794976691, -0.0778020375425),
    ("spline", "flow", 2.43409874881, 0.00712304558973),
    ("spline", "cps", 0.914266319783, -0.0278640421802),
    ("spline-linear", "dance", 3.28829128182, -0.056419743235),
    ("spline-linear", "flow", 2.84354446062, 0.0857674601431),
    ("spline-linear", "cps", 1.05795140103, 0.000321733346436),
    ("causal", "dance", 3.2259310027, -0.0970702787365),
    ("causal", "flow", 2.49151342553, 0.00515323656221),
    ("causal", "cps", 1.06490568225, -0.00343086870039),
    ("causal-lead-in", "dance", 3.15671918158, -0.0734488856097),
    ("causal-lead-in", "flow", 2.46149377561, 0.0218593552435),
    ("causal-lead-in", "cps", 0.985266420476, -0.0112747057882),
]


@pytest.mark.parametrize(("name", "kernel", "norm", "first"), PINNED, ids=[f"{p[0]}-{p[1]}" for p in PINNED])
def test_the_gradient_is_the_pinned_one(name: str, kernel: str, norm: float, first: float) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy, transition=KERNELS[KERNEL_IDS.index(kernel)])
    plan = PLANS[name](trajectory.sigmas)
    found = gradient(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(clip_range=1e-3))[0]
    assert found.norm().item() == pytest.approx(norm, rel=1e-9)
    assert found[0].item() == pytest.approx(first, abs=1e-9)
