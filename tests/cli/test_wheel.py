"""What is installed holds all that the packages need: Python, the C sources, and whatever else lies beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "kernels", "models")


def test_a_wheel_holds_every_file_of_the_packages_and_nothing_else(tmp_path: Path) -> None:
    """Built in a copy: a build folder that lies around would put old files into it."""
    source, target = tmp_path / "source", tmp_path / "target"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target.mkdir()
    files = [path for package in PACKAGES for path in (source / package).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(source)) for path in files}
    program = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", program, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        for name in found:
            assert archive.read(name) == (source / name).read_bytes(), name
    assert found == wanted
    assert {Path(name).suffix for name in found} >= {".py", ".c", ".h", ".json", ".safetensors"}
