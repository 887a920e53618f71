"""Compile the C sources once per machine: the result's name is made of the sources, the compiler and the processor."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
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
DIGEST_BYTES = 32


class BuildError(Exception):
    """The sources could not be compiled; the message says why in one line."""


def build(cache: Path, defines: Sequence[str] = (), compiler: str | None = None) -> Path:
    """The path of the compiled library under `cache`, compiled now if it is not there whole. Torch-free.

    compiler: a command, which may have arguments ("ccache gcc"); None is gcc, or cc where there is none. Two processes
    that compile at once do no harm: each writes a file of its own and renames it. Raises BuildError.
    """
    command = _command(compiler)
    target = cache / f"kernels-{_key(command, defines)}.so"
    try:
        if _is_whole(target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        log.info("event=kernels_compiling compiler=%s once=yes", shlex.join(command))
        with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
            output = Path(folder) / target.name
            _compile(command, defines, output)
            code = output.read_bytes()
            with output.open("ab") as file:
                file.write(hashlib.sha256(code).digest())
            os.replace(output, target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(command)} did not end within {error.timeout:g} s") from error
    except OSError as error:
        raise BuildError(f"cannot compile into {cache}: {error}") from error
    log.info("event=kernels_compiled path=%s", target)
    return target


def _command(wanted: str | None) -> list[str]:
    """The words to which arguments are added."""
    try:
        command = shlex.split(wanted or "") or ["gcc" if shutil.which("gcc") else "cc"]
    except ValueError as error:
        raise BuildError(f"the C compiler {wanted!r}: {error}") from error
    if shutil.which(command[0]) is None:
        asked = f"the C compiler {wanted!r} is not there" if wanted else "no C compiler"
        raise BuildError(f"{asked}: install gcc, or name another with --c-compiler or CC")
    return command


def _compile(compiler: Sequence[str], defines: Sequence[str], output: Path) -> None:
    flags = [*FLAGS, *(WIDE_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
    command = [
        *compiler,
        *flags,
        *(f"-D{name}" for name in defines),
        str(SOURCES / "stack.c"),
        "-o",
        str(output),
        "-lm",
    ]
    status, _, errors = _run(command, TIMEOUT_S)
    if status != 0:
        lines = errors.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"status {status}")
        raise BuildError(f"{shlex.join(compiler)} failed: {_printable(first.strip()[:300])}")
    if not output.is_file():
        raise BuildError(f"{shlex.join(compiler)} failed: it ended well and wrote nothing")


def _run(command: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Exit status, output and errors. A command that takes too long ends with all that it started."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


def _is_whole(path: Path) -> bool:
    """Whether the file ends in its own digest: to load a library that was cut short would end the process."""
    if not path.is_file():
        return False
    code = path.read_bytes()
    return hashlib.sha256(code[:-DIGEST_BYTES]).digest() == code[-DIGEST_BYTES:]


def _key(compiler: Sequence[str], defines: Sequence[str]) -> str:
    parts = [*compiler, _version(compiler), _processor(), *FLAGS, *WIDE_FLAGS, *defines]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _version(compiler: Sequence[str]) -> str:
    try:
        return _run([*compiler, "--version"], 10)[1].strip()
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(compiler)} does not say its version within {error.timeout:g} s") from error
    except OSError as error:
        raise BuildError(f"{shlex.join(compiler)} does not run: {error}") from error


def _processor() -> str:
    """What the compiler may use: code made for one processor must not run on another."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
