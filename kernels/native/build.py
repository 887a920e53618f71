"""Compile the C sources once per machine: the result's name is made of the sources, the compiler and the processor."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("twinpane.kernels")

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
WIDE_FLAGS = ("-mprefer-vector-width=512",)
TIMEOUT_S = 120


class BuildError(Exception):
    """The sources could not be compiled; the message says why in one line."""


def build(cache: Path, defines: Sequence[str] = ()) -> Path:
    """The path of the compiled library under `cache`, compiled now if it is not there. Torch-free.

    Two processes that compile at once do no harm: each writes a file of its own and renames it.
    Raises BuildError.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler or shutil.which(compiler) is None:
        raise BuildError("no C compiler: install gcc, or set CC")
    target = cache / f"kernels-{_key(compiler, defines)}.so"
    if target.is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
            output = Path(folder) / target.name
            flags = [*FLAGS, *(WIDE_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
            command = [compiler, *flags, *(f"-D{name}" for name in defines)]
            command += [str(SOURCES / "stack.c"), "-o", str(output), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                raise BuildError(f"{compiler} failed: {first}")
            os.replace(output, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot compile into {cache}: {error}") from error
    log.info("event=kernels_compiled path=%s", target)
    return target


def _key(compiler: str, defines: Sequence[str]) -> str:
    parts = [compiler, _version(compiler), _processor(), *FLAGS, *WIDE_FLAGS, *defines]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error


def _processor() -> str:
    """What the compiler may use: code made for one processor must not run on another."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
