"""Published preference rewards: CLIP networks that measure how well an image suits its prompt."""

from jagg_core.rewards.preference.published import (
    CLIPSCORE,
    HPSV21,
    PICKSCORE,
    PreferenceReward,
    PreferenceSettings,
    Published,
    load_preference,
)

PUBLISHED: tuple[Published, ...] = (CLIPSCORE, PICKSCORE, HPSV21)
"""All published rewards."""

__all__ = [
    "CLIPSCORE",
    "HPSV21",
    "PICKSCORE",
    "PUBLISHED",
    "PreferenceReward",
    "PreferenceSettings",
    "Published",
    "load_preference",
]
