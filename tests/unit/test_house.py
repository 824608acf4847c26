"""The rules of the house that only a running interpreter can check; the import order itself is import-linter's."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import async_rl

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("protocol", "async_rl", "workers") for path in (ROOT / room).rglob("*.py"))


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def everything_in(package: str) -> str:
    """A statement that imports a package and all its modules."""
    return (
        f"import importlib, pkgutil, {package} as package\n"
        f"for module in pkgutil.walk_packages(package.__path__, '{package}.'): importlib.import_module(module.name)"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import async_rl",
        "from async_rl import RunConfig, Trajectory, VersionSpan, load_config",
        everything_in("protocol"),
        everything_in("async_rl.config"),
        everything_in("async_rl.registry"),
        everything_in("async_rl.run_dir"),
        everything_in("async_rl.coordinator"),
        "import workers.arguments",
        "import workers.coordinator, workers.reward, workers.rollout, workers.trainer",
    ],
)
def test_torch_stays_out_of(statement):
    assert not {"torch", "vllm", "transformers"} & modules_after(statement)


def test_public_names_all_resolve_and_unknown_ones_do_not():
    for name in async_rl.__all__:
        assert getattr(async_rl, name) is not None
    assert set(async_rl.__all__) <= set(dir(async_rl))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        async_rl.Nonsense  # noqa: B018 - the look-up is the test


def test_another_distribution_named_protocol_is_explained(tmp_path):
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol/__init__.py").write_text("VERSION = 1\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import async_rl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert str(tmp_path) in message
    assert "virtual environment of its own" in message


def test_ours_passes_the_collision_check_and_an_empty_module_does_not():
    async_rl._require_own_protocol(sys.modules["protocol"])
    with pytest.raises(ImportError, match="not async-rl's"):
        async_rl._require_own_protocol(ModuleType("protocol"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_postpones_annotations_and_stays_readable(path):
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    if not any(not isinstance(node, ast.Expr) for node in tree.body):
        return  # nothing but a docstring
    assert "from __future__ import annotations" in text or path.name == "__init__.py"
    assert len(text.splitlines()) <= 450, "split the file"
    long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == async_rl.__version__
    assert f"## {async_rl.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
