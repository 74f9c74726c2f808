"""Rewards: what a policy is trained to increase. Load one with `load_reward`, call it through `score`."""

from jagg_core.rewards.base import (
    FunctionReward,
    Reward,
    RewardFailed,
    RewardNotFinite,
    WeightedSum,
    differentiable,
    reward_versions,
    score,
    score_in_update,
)
from jagg_core.rewards.classifier import ClassifierLogProb, Smiling, load_classifier, read_as_prompted
from jagg_core.rewards.pixels import Colourfulness, Ink, Random, Redness, Sharpness
from jagg_core.rewards.preference import PreferenceReward
from jagg_core.rewards.registry import check_reward, list_rewards, load_reward, options_of, reward_fingerprints
from jagg_core.rewards.training import train_classifier

__all__ = [
    "ClassifierLogProb",
    "Colourfulness",
    "FunctionReward",
    "Ink",
    "PreferenceReward",
    "Random",
    "Redness",
    "Reward",
    "RewardFailed",
    "RewardNotFinite",
    "Sharpness",
    "Smiling",
    "WeightedSum",
    "check_reward",
    "differentiable",
    "list_rewards",
    "load_classifier",
    "load_reward",
    "options_of",
    "read_as_prompted",
    "reward_fingerprints",
    "reward_versions",
    "score",
    "score_in_update",
    "train_classifier",
]
