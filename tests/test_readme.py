"""The README's code runs, and the files it points to exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from jagg_core.backbones.check import check_backbone

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

TRAINER, BACKBONE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_trainer_example_leaves_gradients(capsys) -> None:  # type: ignore[no-untyped-def]
    names = run(TRAINER)
    assert capsys.readouterr().out.split() == ["8", "closed_form", "batched"]
    parameters = names["policy"].parameters()  # type: ignore[attr-defined]
    assert sum(p.grad is not None and bool(p.grad.any()) for p in parameters) > 100


def test_the_backbone_example_is_short_and_keeps_the_contract() -> None:
    assert len(BACKBONE.splitlines()) <= 35
    load = run(BACKBONE)["load"]
    findings = check_backbone(load("cpu", torch.float32))  # type: ignore[operator]
    assert [finding for finding in findings if not finding.ok] == []


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 2
    assert [link for link in links if not (ROOT / link).exists()] == []
