"""What libraries say when they are imported: the one remark that nobody can act on is dropped, nothing else."""

from __future__ import annotations

import logging

from jagg_core.backbones.pretrained.quiet import SOURCE, without_torchvision


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_only_what_is_said_of_image_processors_is_dropped() -> None:
    said = "`XImageProcessor` requires torchvision (not installed); falling back to `XImageProcessorPil`"
    logger, kept = logging.getLogger(SOURCE), Kept()
    logger.addHandler(kept)
    try:
        with without_torchvision():
            logger.warning(said)
            logger.warning("torchvision is broken")
        logger.warning(said)
    finally:
        logger.removeHandler(kept)
    assert kept.messages == ["torchvision is broken", said]
