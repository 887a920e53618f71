"""Who may import whom. The table is the drawing of the house; a new arrow is a decision, made here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORDS = {
    "server",
    "server.config",
    "server.errors",
    "server.metrics",
    "server.rebuild",
    "server.request",
    "server.step",
}

MAY_IMPORT: dict[str, set[str]] = {
    "server.config": {"server.errors"},
    "server.errors": set(),
    "server.request": {"server.errors"},
    "server.step": {"server.request"},
    "server.rebuild": set(),
    "server.metrics": {"server.request"},
    "server.cache": WORDS,
    "server.scheduler": WORDS | {"server.cache"},
    "server.engine": WORDS | {"server.scheduler"},
    "server.text": WORDS,
    "server.api": WORDS,
    "server.multimodal": WORDS,
    "server.model": WORDS | {"kernels"},
    "server.memory_plan": WORDS | {"server.cache", "server.model"},
    "kernels": set(),
    "server.healthcheck": WORDS,
    # Port and files are checked before torch is imported, so the command line calls these two itself.
    "server.__main__": WORDS | {"server.assemble", "server.api", "server.model", "server.simulator"},
    "server.simulator": WORDS | {"server.cache", "server.model", "server.scheduler"},
}
"""Room -> rooms whose modules it may import; its own are always allowed. server.assemble may import everything."""

READS_THE_ENVIRONMENT = {"server.__main__", "server.healthcheck"}
"""They pass it on: the configuration is made of it, in `server.config`, and no other module looks at it."""

WITHOUT_TORCH = (
    "server.api",
    "server.engine",
    "server.scheduler",
    "server.cache",
    "server.text",
    "server.metrics",
    "server.simulator",
)


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("server", "kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module: str) -> str:
    return next((room for room in MAY_IMPORT if module == room or module.startswith(room + ".")), module)


def ours_imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            # `from server.api import serve` names a module as often as a thing in one.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [name for name in names if name in MODULES]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("server", "kernels"))


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_in_one_place(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & {"environ", "environb", "getenv"} or module in READS_THE_ENVIRONMENT


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("server", "server.assemble")])
def test_arrows_point_down_only(module: str) -> None:
    room = room_of(module)
    assert room in MAY_IMPORT, f"{module} lies in no room of the drawing"
    for imported in ours_imported_by(MODULES[module]):
        target = room_of(imported)
        assert target == room or target in MAY_IMPORT[room], f"{module} imports {imported}"


def test_only_the_assembly_knows_every_room() -> None:
    knows = {room_of(imported) for imported in ours_imported_by(MODULES["server.assemble"])}
    assert {"server.api", "server.cache", "server.engine", "server.model", "server.scheduler", "server.text"} <= knows


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_loads_without_torch(room: str) -> None:
    names = [module for module in MODULES if module == room or module.startswith(room + ".")]
    assert names
    code = "\n".join(
        ["import sys", "sys.modules['torch'] = None  # importing it now raises", *(f"import {n}" for n in names)]
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_torch_free_modules_of_the_model_room_load_without_torch() -> None:
    names = ["server.model.spec", "server.model.kv_layout", "server.model.source", "server.model.generation"]
    names += [m for m in MODULES if m.startswith("server.model.families")]
    code = "\n".join(["import sys", "sys.modules['torch'] = None", *(f"import {n}" for n in names)])
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
