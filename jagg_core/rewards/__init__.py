"""Rewards: what a policy is trained to increase. Load one with `load_reward`, call it through `score`."""

from jagg_core.rewards.base import FunctionReward, Reward, WeightedSum, score
from jagg_core.rewards.classifier import ClassifierLogProb, load_classifier, read_as_prompted, train_classifier
from jagg_core.rewards.pixels import Colourfulness, Ink, Redness, Sharpness
from jagg_core.rewards.registry import list_rewards, load_reward

__all__ = [
    "ClassifierLogProb",
    "Colourfulness",
    "FunctionReward",
    "Ink",
    "Redness",
    "Reward",
    "Sharpness",
    "WeightedSum",
    "list_rewards",
    "load_classifier",
    "load_reward",
    "read_as_prompted",
    "score",
    "train_classifier",
]
