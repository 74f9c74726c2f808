"""Silences notes of libraries at their import on which a user cannot act."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SOURCE = "transformers.utils.import_utils"
"""The logger that says so of every image processor of a pipeline that diffusers names; none of them is used here."""


def _is_news(record: logging.LogRecord) -> bool:
    return "ImageProcessor` requires torchvision (not installed)" not in record.getMessage()


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Silences, in the body, transformers' notes on image processors that need torchvision."""
    logger = logging.getLogger(SOURCE)
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)
