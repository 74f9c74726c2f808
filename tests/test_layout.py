"""The direction of imports, read from the source: jagg_core <- bench <- analysis, and a core that imports light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jagg_core", "analysis", "bench")

FORBIDDEN = {
    "jagg_core": {"analysis", "bench", "jinja2", "matplotlib", "pandas", "pytest", "seaborn"},
    "analysis": set(),
    "bench": {"analysis"},
}
"""What a package never imports, not even inside a function."""

LAZY = {"diffusers", "skimage", "sklearn", "torchvision", "transformers"}
"""Heavy and optional: imported inside the function that needs it, in every package."""

BACKBONES = "jagg_core.backbones"
"""The one place in the core that knows diffusers."""


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, where, and whether merely importing the file imports it."""

    module: str
    line: int
    eager: bool


def _for_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import in a module of ``package``, also relative ones and ``import_module("literal")``."""

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(name.name, node.lineno, eager) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")[: -(level - 1) or None] if level else []
                base = ".".join([*parts, *([module] if module else [])])
                yield from (Import(f"{base}.{name.name}", node.lineno, eager) for name in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module, node.lineno, eager)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for outside in (*node.decorator_list, node.args):
                    yield from visit(outside, eager)
                for inside in node.body:
                    yield from visit(inside, False)
                return
            case ast.Lambda():
                yield from visit(node.args, eager)
                yield from visit(node.body, False)
                return
            case ast.If() if _for_type_checking(node):
                for inside in node.body:
                    yield from visit(inside, False)
                for inside in node.orelse:
                    yield from visit(inside, eager)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager)

    return visit(tree, True)


def violations(root: Path, core_dependencies: set[str]) -> list[str]:
    """Imports under ``root`` that break a rule, each as ``file:line: what``."""
    found = []
    light = {"jagg_core", *core_dependencies, *sys.stdlib_module_names}
    for top in PACKAGES:
        for path in sorted((root / top).rglob("*.py")):
            relative = path.relative_to(root)
            package = ".".join(relative.parent.parts)
            in_backbones = package == BACKBONES or package.startswith(f"{BACKBONES}.")
            for item in imports(ast.parse(path.read_text(encoding="utf-8"), str(relative)), package):
                name = item.module.split(".")[0]
                where = f"{relative.as_posix()}:{item.line}"
                if name in FORBIDDEN[top]:
                    found.append(f"{where}: {top} imports {name}")
                elif top == "jagg_core" and name == "diffusers" and not in_backbones:
                    found.append(f"{where}: {name} is imported outside {BACKBONES}")
                elif item.eager and name in LAZY:
                    found.append(f"{where}: {name} is imported at module level")
                elif item.eager and top == "jagg_core" and name not in light:
                    found.append(f"{where}: {name} is not a core dependency")
    return found


def core_dependencies() -> set[str]:
    """Names of the core dependencies (each is imported under the name it is distributed by)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]}


def test_imports_point_at_the_core() -> None:
    assert violations(ROOT, core_dependencies()) == []


def test_every_core_module_belongs_to_a_package() -> None:
    """A folder without ``__init__.py`` would be left out of the wheel."""
    folders = {path.parent for path in (ROOT / "jagg_core").rglob("*.py")}
    assert folders, "no module found"
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


BAD = [
    ("jagg_core/a.py", "import analysis.report.fidelity.tables", "jagg_core imports analysis"),
    ("jagg_core/a.py", "def f():\n    from bench import cells", "jagg_core imports bench"),
    ("jagg_core/deep/a.py", "def f():\n    import pandas as pd", "jagg_core imports pandas"),
    ("jagg_core/a.py", "import torch, matplotlib.pyplot", "jagg_core imports matplotlib"),
    ("jagg_core/a.py", "def f():\n    importlib.import_module('seaborn')", "jagg_core imports seaborn"),
    ("jagg_core/a.py", "if TYPE_CHECKING:\n    import pytest", "jagg_core imports pytest"),
    ("jagg_core/a.py", "class C:\n    def f(self):\n        import jinja2", "jagg_core imports jinja2"),
    ("jagg_core/a.py", "import scipy.stats", "scipy is not a core dependency"),
    ("jagg_core/a.py", "def f():\n    import diffusers", "diffusers is imported outside jagg_core.backbones"),
    ("jagg_core/backbones_extra/a.py", "def f():\n    import diffusers", "diffusers is imported outside"),
    (
        "jagg_core/backbones/a.py",
        "from diffusers import FluxTransformer2DModel",
        "diffusers is imported at module level",
    ),
    ("jagg_core/rewards/a.py", "try:\n    import transformers\nexcept ImportError:\n    pass", "at module level"),
    ("jagg_core/a.py", "class C:\n    import sklearn.datasets", "sklearn is imported at module level"),
    ("jagg_core/a.py", "def f(x=__import__('skimage')):\n    pass", "skimage is imported at module level"),
    ("jagg_core/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torchvision", "at module level"),
    ("analysis/a.py", "from torchvision import io", "torchvision is imported at module level"),
    ("bench/a.py", "import analysis", "bench imports analysis"),
    ("bench/a.py", "def f():\n    from analysis.report import x", "bench imports analysis"),
]


@pytest.mark.parametrize(("path", "source", "message"), BAD, ids=[f"{path}: {message}" for path, _, message in BAD])
def test_a_bad_import_is_found(path: str, source: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    [violation] = violations(tmp_path, {"torch"})
    assert violation.startswith(f"{path}:")
    assert message in violation


GOOD = [
    ("jagg_core/a.py", "from __future__ import annotations\nimport json\nimport torch.nn\nfrom jagg_core import bench"),
    ("jagg_core/deep/a.py", "from . import analysis\nfrom .pandas import x\nfrom ..bench import y\nfrom .. import z"),
    ("jagg_core/backbones/a.py", "def f():\n    from diffusers import FluxTransformer2DModel"),
    ("jagg_core/backbones/a.py", "if TYPE_CHECKING:\n    import diffusers"),
    ("jagg_core/rewards/a.py", "load = lambda: __import__('transformers')"),
    ("analysis/a.py", "import pandas\nimport analysis.report.fidelity.tables\nimport jagg_core"),
    ("analysis/a.py", "from bench.noise import ratio_of_medians"),
    ("bench/a.py", "import pytest\nfrom bench import cells\nfrom jagg_core.records import Record"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_a_good_import_passes(path: str, source: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert violations(tmp_path, {"torch"}) == []


def test_reports_run_no_network() -> None:
    """What turns records into pages imports nothing that rolls out or differentiates."""
    found = []
    for path in sorted((ROOT / "analysis" / "report").rglob("*.py")):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path.name}: {i.module}" for i in imports(tree, package) if i.module.startswith("analysis.measure")]
    assert found == []


def test_checking_a_record_needs_no_plotting_library() -> None:
    code = "import sys, analysis.report.checked; print([m for m in ('matplotlib', 'seaborn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["jagg_core", "jagg_core.grpo"])
def test_names_that_load_late_are_those_that_readers_and_type_checkers_see(package: str) -> None:
    module = import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {item.module for item in imports(ast.Module([block], []), package)}
    assert seen == {f"{package}.{home}.{name}" for home, names in module._HOMES.items() for name in names}
    assert {name.rpartition(".")[2] for name in seen} == set(module.__all__) <= set(dir(module))
    for name in seen:
        home, _, last = name.rpartition(".")
        assert getattr(module, last) is getattr(import_module(home), last)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def test_submodules_are_attributes_and_the_package_alone_is_light() -> None:
    code = "import sys, jagg_core; print('torch' in sys.modules, jagg_core.engine.Report is jagg_core.Report)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]
