"""The wheel: only ``jagg_core`` is in it, with its weights, and it imports with nothing but the core dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

ABSENT = (
    *("analysis", "bench"),
    *("diffusers", "matplotlib", "pandas", "pytest", "scipy", "seaborn", "skimage", "sklearn", "transformers"),
)
"""What the clean environment must not have."""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed, free of what the caller's environment would add to it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build could pick up, so that building leaves the checkout as it is and old builds stay out."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("jagg_core", "analysis", "bench", "tests", "notebooks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the copy, without network access."""
    out = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", *build, "--wheel-dir", out, source, cwd=out)
    [path] = out.glob("*.whl")
    return path


def metadata_requirements(wheel: Path) -> list[Requirement]:
    """What the wheel requires when no extra is asked for."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(name).decode())
    return needed([Requirement(line) for line in headers.get_all("Requires-Dist", [])])


def needed(requirements: list[Requirement], extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """Those whose marker holds here, with one of ``extras`` or with none."""
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]


def closure(requirements: list[Requirement]) -> list[Distribution]:
    """The installed distributions that satisfy ``requirements``, with all that they require in turn."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(requirements)
    while pending:
        requirement = pending.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(requirement.name)
        pending += needed([Requirement(line) for line in found[key[0]].requires or []], key[1])
    return list(found.values())


def link(distributions: list[Distribution], folder: Path) -> None:
    """Links in ``folder`` to the packages, modules and metadata of these distributions, and to nothing else."""
    for dist in distributions:
        for top in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(dist.locate_file(top))))


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    link(closure(metadata_requirements(wheel)), dependencies)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=folder)
    purelib = Path(
        run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    (purelib / "dependencies.pth").write_text(f"{dependencies}\n")
    return python


def test_wheel_holds_the_core_and_its_weights_only(source: Path, wheel: Path) -> None:
    core = source / "jagg_core"
    shipped = [*core.rglob("*.py"), core / "py.typed", *core.glob("*/weights/*.safetensors")]
    expected = {path.relative_to(source).as_posix() for path in shipped}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if name.split("/")[0] == "jagg_core-0.1.0.dist-info"}
    assert names - metadata == expected
    assert "jagg_core-0.1.0.dist-info/licenses/LICENSE" in metadata


def test_core_dependencies_are_light(wheel: Path) -> None:
    assert {r.name for r in metadata_requirements(wheel)} == {"torch", "numpy", "safetensors", "tqdm"}


def test_imports_from_the_wheel_without_the_extras(clean_python: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, importlib.util, json, pkgutil
import jagg_core
names = [m.name for m in pkgutil.walk_packages(jagg_core.__path__, "jagg_core.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
present = [name for name in {ABSENT!r} if importlib.util.find_spec(name) is not None]
print(json.dumps([jagg_core.__file__, names, present]))
"""
    file, names, present = json.loads(run(clean_python, "-I", "-W", "error", "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(clean_python.parents[1])
    assert "jagg_core.backbones" in names
    assert present == []
