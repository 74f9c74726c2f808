"""The method inside other trainers: their stored tensors, their backward, their accumulation counters."""

from jagg_core.integrations.plans import window_plan
from jagg_core.integrations.replay import HostPolicy, host_trajectory
from jagg_core.integrations.update import plan_update
from jagg_core.trajectory import weights_version

__all__ = ["HostPolicy", "host_trajectory", "plan_update", "weights_version", "window_plan"]
