"""The README's code runs, and the files it points to exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_trainer_example_leaves_gradients(capsys) -> None:  # type: ignore[no-untyped-def]
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert capsys.readouterr().out.split() == ["8", "closed_form", "batched"]
    parameters = names["policy"].parameters()  # type: ignore[attr-defined]
    assert sum(p.grad is not None and bool(p.grad.any()) for p in parameters) > 100


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 2
    assert [link for link in links if not (ROOT / link).exists()] == []
