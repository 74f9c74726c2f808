"""Loops of the shape that public trainers have: their order of calls, accumulation and permutations, nothing else.

Written without the repositories' code; a module names the commit that its formulas were checked against, if it was.
Each host has an epoch (a rollout and its update), which runs ``inner`` in the place of its loop over trained steps, and
that loop of its own. What a host's script would have as local names is in one dictionary, where the blocks of its page
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from tests.integrations.dance import dance_epoch, dance_names, dance_own, mix_names
from tests.integrations.factory import TRAINED, factory_modules, factory_train
from tests.integrations.flow import flow_epoch, flow_names, flow_own
from tests.integrations.nemo import nemo_train
from tests.integrations.network import Inner, Names
from tests.integrations.unirl import STEPS, unirl_modules, unirl_train
from tests.integrations.verl import WINDOW, verl_modules, verl_train


@dataclass(frozen=True)
class Host:
    """A trainer.

    Attributes:
        page: the name of its page.
        names: its local names, by dtype and optimizer steps per rollout.
        epoch: one rollout and its update of four micro-batches.
        own: its own loop over trained steps.
        steps: trained steps of a micro-batch.
        variant: which of the page's variants.
    """

    page: str
    names: Callable[[torch.dtype, int], Names]
    epoch: Callable[[Names, Inner, int], None]
    own: Inner
    steps: int
    variant: str = ""


HOSTS = {
    "dancegrpo": Host("dancegrpo", dance_names, dance_epoch, dance_own, 4),
    "mixgrpo": Host("mixgrpo", mix_names, dance_epoch, dance_own, 4),
    "mixgrpo-dance": Host("mixgrpo", partial(mix_names, flow_grpo_sampling=False), dance_epoch, dance_own, 4),
    "flow_grpo-sd3": Host("flow_grpo", flow_names, flow_epoch, flow_own, 7, "SD3"),
    "flow_grpo-sd3-kl": Host("flow_grpo", partial(flow_names, beta=0.04), flow_epoch, flow_own, 7, "SD3"),
    "flow_grpo-flux": Host("flow_grpo", partial(flow_names, flux=True), flow_epoch, flow_own, 7, "Flux"),
    "flow_grpo-sd3-unguided": Host("flow_grpo", partial(flow_names, cfg=False), flow_epoch, flow_own, 7, "SD3"),
    "flow_grpo-sd3-fast": Host("flow_grpo", partial(flow_names, window=4), flow_epoch, flow_own, 4, "SD3"),
    "flow_grpo-flux-fast": Host(
        "flow_grpo", partial(flow_names, flux=True, window=4, sde_type="cps"), flow_epoch, flow_own, 4, "Flux"
    ),
}


@dataclass(frozen=True)
class ClassHost:
    """A trainer whose page adds a class or a function of its own.

    Attributes:
        modules: what the page's block imports, by name.
        train: its training, with a class in the place of its own.
        name: of the page's class or function.
        steps: trained steps of a micro-batch.
        passes: of the page's own plan for them.
        keeps_means: whether the noise of the rollout is known: then the update has a closed form on policy.
    """

    modules: Callable[[], dict[str, ModuleType]]
    train: Callable[..., Names]
    name: str
    steps: int
    passes: int
    keeps_means: bool = True


CLASS_HOSTS = {
    "unirl": ClassHost(unirl_modules, unirl_train, "PlanFlowGRPO", len(STEPS), 3),
    "verl-omni": ClassHost(verl_modules, verl_train, "PlanEngine", WINDOW, 2),
    "flow-factory": ClassHost(factory_modules, factory_train, "PlanGRPOTrainer", len(TRAINED), 2),
    "nemo-rl": ClassHost(dict, nemo_train, "plan_chunk", 2, 2, keeps_means=False),
}
