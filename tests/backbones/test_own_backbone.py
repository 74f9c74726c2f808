"""Your own backbone as ``module:function``: the documents' example loads, and what cannot work is refused early."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from jagg_core import ClassifierFreeGuidance, DanceSDE, ReplayMismatch, dance_schedule, initial_latents, rollout
from jagg_core.__main__ import main
from jagg_core.backbones import check_backbone_name, load_backbone
from jagg_core.backbones.check import CHECKS, check_backbone

PAGE = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text()
[TEMPLATE] = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "load = " in code]

BROKEN = """
class WithoutDecode(Backbone):
    def __getattribute__(self, name):
        if name in ("decode", "dataset"):
            raise AttributeError(name)
        return super().__getattribute__(name)

class DeafToRows(Backbone):
    def policy(self, prompts, guidance=1.0):
        policy = super().policy(prompts, guidance)
        policy.velocity = lambda latents, sigma, rows: Policy.velocity(policy, latents, sigma, rows % 1)
        return policy

class StringPolicy(Backbone):
    policy = "policy"

class inside:
    load = Backbone

number = 3
def nothing(device, dtype):
    return None
def one(device):
    raise AssertionError("called")
def three(device, dtype, more):
    raise AssertionError("called")
def never(device, dtype):
    raise AssertionError("loaded before the refusal")
def raises(device, dtype):
    raise OSError("no weights here")
"""


@pytest.fixture(autouse=True)
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``my_module``, the documents' example, and more around it, in a folder that can be imported from."""
    (tmp_path / "my_module.py").write_text(TEMPLATE)
    (tmp_path / "my_broken.py").write_text("from my_module import *\n" + BROKEN)
    (tmp_path / "my_unfinished.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_module", "my_broken", "my_unfinished"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# What works


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_example_of_the_readme_keeps_the_contract(dtype: torch.dtype) -> None:
    backbone = load_backbone("my_module:load", dtype=dtype)
    assert {p.dtype for p in backbone.transformer.parameters()} == {dtype}
    findings = check_backbone(backbone)
    assert [finding for finding in findings if not finding.ok or "warning" in finding.text] == []


def test_guidance_is_part_of_the_example() -> None:
    backbone = load_backbone("my_module:load")
    policy = backbone.policy(["red", "blue"], guidance=3.0)
    assert isinstance(policy, ClassifierFreeGuidance)
    latents = initial_latents(backbone.latent_shape, 0, range(2))
    trajectory = rollout(policy, dance_schedule(4), DanceSDE(0.7), latents, seed=0)
    assert trajectory.signature["guidance"] == "3.0"
    assert trajectory.signature["conditional prompts"] == "['red', 'blue']"
    assert trajectory.weights_version is not None
    with pytest.raises(ReplayMismatch, match=r"guidance: the rollout used '3\.0', the policy now has '1\.0'"):
        trajectory.require(signature=backbone.policy(["red", "blue"]).signature())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["my_module:load", "my_module:Backbone", "my_broken:inside.load"])
def test_functions_classes_and_attributes_load(name: str) -> None:
    check_backbone_name(name)
    assert load_backbone(name).name == "mine"


# What is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:load", "there is no module 'no_such_module_anywhere'; allowed: one of"),
        ("my_module.deeper:load", "there is no module 'my_module.deeper'; allowed: one of"),
        ("my_module:lode", "my_module has no 'lode'; allowed: one of"),
        ("my_module:load.more", "my_module has no 'load.more'; allowed: one of"),
        ("my_broken:number", r"must be a function of \(device, dtype\), got 3"),
        ("my_broken:one", r"must be a function of \(device, dtype\), got <function one"),
        ("my_broken:three", r"must be a function of \(device, dtype\), got <function three"),
        *((name, r"cannot be read; allowed: one of \['digits-flux'") for name in (":", ":load", "my_module:", "a:b:c")),
        *((name, "cannot be read; allowed: .* or module:function") for name in (".my_module:load", "my module:load")),
    ],
)
def test_a_name_that_cannot_work_is_refused_before_loading(name: str, message: str) -> None:
    for look_up in (check_backbone_name, load_backbone):
        with pytest.raises(ValueError, match=f"^backbone {re.escape(repr(name))}.*{message}"):
            look_up(name)


def test_device_and_dtype_are_refused_before_loading() -> None:
    with pytest.raises(ValueError, match=r"dtype must be floating point, got torch\.int64"):
        load_backbone("my_broken:never", dtype=torch.int64)
    with pytest.raises(ValueError, match="device 'nonsense' cannot be used here"):
        load_backbone("my_broken:never", "nonsense")
    check_backbone_name("my_broken:never")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "my_broken:nothing",
            "type NoneType with no name, no dataset, .*; a Backbone has name, dataset, prompts",
        ),
        ("my_broken:WithoutDecode", "type WithoutDecode with no dataset, no decode; a Backbone has name, "),
        ("my_broken:StringPolicy", "type StringPolicy with a policy that is no method; a Backbone has"),
    ],
)
def test_an_object_that_is_no_backbone_says_what_it_lacks(name: str, message: str) -> None:
    check_backbone_name(name)
    with pytest.raises(ValueError, match=f"backbone {name!r} gave an object of {message}"):
        load_backbone(name)


def test_an_import_error_inside_your_own_module_is_shown() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_backbone("my_unfinished:load")


# The command


def test_the_check_command_passes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["backbones", "check", "my_module:load", "--dtype", "float64"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(re.match(rf"ok {{6}}{name} +\S", line) for name, line in zip(CHECKS, lines, strict=True))
    assert re.search(r"^ok +batched +.*; relative error: \d\S*$", "\n".join(lines), re.MULTILINE)


def test_the_check_command_fails_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["backbones", "check", "my_broken:DeafToRows"])
    assert caught.value.code == 1
    shown = capsys.readouterr()
    lines = dict(zip(CHECKS, shown.out.splitlines(), strict=True))
    assert [name for name, line in lines.items() if line.startswith("FAILED")] == ["prompts"]
    assert lines["prompts"].startswith("FAILED  prompts          in a batch with several prompts, a sample does not")
    assert shown.err == "python -m jagg_core: checks failed: 1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_module:lode"], "my_module has no 'lode'"),
        (["my_broken:nothing"], "NoneType"),
        (["my_broken:raises"], "no weights here"),
        (["digit-flux"], "did you mean 'digits-flux'"),
        (["my_module:load", "--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["my_module:load", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([], "name"),
    ],
)
def test_the_check_command_refuses_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["backbones", "check", *arguments])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
