"""The one engine: runs any plan against any policy.

The paper's four phases, for every bundle of knots that shares a backward call:

1. forwards: with a graph at the knots; without one at other steps whose upstream gradient needs a velocity (`passes`);
2. upstream gradients ``s_j``, from transition and loss alone (`upstream`);
3. aggregation ``u_i = sum_j w[i, j] s_j`` (`aggregation`);
4. one backward through the network from all knots of the bundle (`passes`).

`jagg_core.reference.plain_gradient` is the same in one short loop, without modes and checks.
"""

from jagg_core.choices import BackwardMode, PartlyClipped, UpstreamMode
from jagg_core.engine.meter import Fidelity, LowFidelity, Meter
from jagg_core.engine.modes import OffPolicyError
from jagg_core.engine.report import RatioNoise, Report
from jagg_core.engine.update import accumulate_gradients

__all__ = [
    "BackwardMode",
    "Fidelity",
    "LowFidelity",
    "Meter",
    "OffPolicyError",
    "PartlyClipped",
    "RatioNoise",
    "Report",
    "UpstreamMode",
    "accumulate_gradients",
]
