"""The library is compiled once for each compiler, processor and set of sources; what cannot be compiled says why."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.native import build as building
from kernels.native import library
from kernels.native.build import BuildError, build
from kernels.native.kernels import NativeKernels

FakeCompiler = Callable[..., str]


@pytest.fixture
def fake_compiler(tmp_path: Path) -> FakeCompiler:
    """Makes a compiler of a few lines of shell: it copies a library, or does what `body` says."""

    def make(body: str = 'printf library > "$out"', version: str = "fake 1.0") -> str:
        script = tmp_path / "fakecc"
        script.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}\n'
            f'echo "$@" >> {tmp_path}/calls\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
            f"{body}\n"
        )
        script.chmod(0o755)
        return str(script)

    return make


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_second_start_compiles_nothing(tmp_path: Path, fake_compiler: FakeCompiler) -> None:
    compiler = fake_compiler()
    first = build(tmp_path / "cache", (), compiler)
    assert build(tmp_path / "cache", (), compiler) == first
    assert len(calls(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


def test_another_define_compiler_processor_or_source_makes_another_file(
    tmp_path: Path, fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    compiler = fake_compiler()
    made = [build(cache, (), compiler), build(cache, ("TP_PORTABLE",), compiler)]
    assert "-DTP_PORTABLE" in calls(tmp_path)[1]
    fake_compiler(version="fake 2.0")
    made.append(build(cache, (), compiler))
    compiler += " -m32"
    made.append(build(cache, (), compiler))
    assert calls(tmp_path)[3].startswith("-m32 ")
    monkeypatch.setattr(building, "_processor", lambda: "flags : another")
    made.append(build(cache, (), compiler))
    sources = tmp_path / "csrc"
    shutil.copytree(building.SOURCES, sources)
    monkeypatch.setattr(building, "SOURCES", sources)
    assert build(cache, (), compiler) == made[-1]
    (sources / "gemm.h").write_text((sources / "gemm.h").read_text() + "\n")
    made.append(build(cache, (), compiler))
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_file_in_the_cache_is_compiled_anew(
    tmp_path: Path, fake_compiler: FakeCompiler, damage: bytes | None
) -> None:
    """Empty, another file, or cut short as a full disk or a power cut leaves it: to load that would be a crash."""
    compiler = fake_compiler()
    target = build(tmp_path / "cache", (), compiler)
    whole = target.read_bytes()
    target.write_bytes(whole[:-1] if damage is None else damage)
    assert build(tmp_path / "cache", (), compiler) == target
    assert target.read_bytes() == whole
    assert len(calls(tmp_path)) == 2


def test_no_compiler_is_said_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C compiler: install gcc, or name another with --c-compiler or CC"):
        build(tmp_path)
    with pytest.raises(BuildError, match="the C compiler 'no-such-compiler -O2' is not there: install gcc"):
        build(tmp_path, (), "no-such-compiler -O2")
    with pytest.raises(BuildError, match="No closing quotation"):
        build(tmp_path, (), 'gcc "')


def test_what_the_environment_says_comes_through_the_configuration_only(
    tmp_path: Path, fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path / "cache", (), fake_compiler()).is_file()


def test_cc_is_taken_where_there_is_no_gcc(
    tmp_path: Path, fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "path").mkdir()
    Path(fake_compiler()).rename(folder / "cc")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(building.shutil, "which", lambda name: str(folder / "cc") if name == "cc" else None)
    assert build(tmp_path / "cache").is_file()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'note: x\nstack.c:1: error: unknown thing' >&2; exit 1", "stack.c:1: error: unknown thing"),
        ("echo 'cc1: out of memory' >&2; exit 1", "cc1: out of memory"),
        ("printf 'Fehler \\344\\n' >&2; exit 4", "Fehler"),
        ("exit 3", "status 3"),
        ("exit 0", "it ended well and wrote nothing"),
        ("printf 'error: \\033[31mred\\033[0m\\007\\n' >&2; exit 1", "error:  [31mred [0m"),
        ("kill -9 $$", "status -9"),
    ],
)
def test_a_compiler_that_fails_is_reported_in_one_line_and_leaves_nothing(
    tmp_path: Path, fake_compiler: FakeCompiler, body: str, said: str
) -> None:
    compiler = fake_compiler(body)
    with pytest.raises(BuildError) as raised:
        build(tmp_path / "cache", (), compiler)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what it started live on."""
    compiler = fake_compiler(f"sleep 60 & echo $! > {tmp_path / 'child'}; wait")
    monkeypatch.setattr(building, "TIMEOUT_S", 1.0)
    with pytest.raises(BuildError, match="did not end within 1 s"):
        build(tmp_path / "cache", (), compiler)
    status = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "its child runs on"


def test_a_library_that_cannot_be_loaded_is_made_anew_next_time(tmp_path: Path, fake_compiler: FakeCompiler) -> None:
    """What a compiler wrote once, in an evil hour, is not kept for good."""
    compiler = fake_compiler()  # writes something that is no library
    with pytest.raises(BuildError, match="cannot load"):
        NativeKernels(tmp_path / "cache", 1, compiler=compiler)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, fake_compiler: FakeCompiler) -> None:
    compiler = fake_compiler()
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot compile into"):
        build(tmp_path / "file", (), compiler)
    with pytest.raises(BuildError, match="cannot compile into"):
        build(tmp_path / "file" / "below", (), compiler)
    if os.geteuid() != 0:  # who may do anything is never refused
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(BuildError, match="cannot compile into"):
            build(tmp_path / "closed", (), compiler)


def test_what_compiles_and_is_no_library_of_ours_is_a_build_error(tmp_path: Path, fake_compiler: FakeCompiler) -> None:
    with pytest.raises(BuildError, match="cannot load"):
        NativeKernels(tmp_path / "cache", compiler=fake_compiler())


def test_two_processes_that_compile_at_once_both_get_the_library(tmp_path: Path) -> None:
    """The real compiler, as two servers started together would run it."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    program = (
        "import sys\nfrom pathlib import Path\nfrom kernels.native import build as b, library\n"
        "b.FLAGS = tuple('-O0' if f == '-O3' else f for f in b.FLAGS)\n"
        "print(library.load(b.build(Path(sys.argv[1]), ('TP_PORTABLE',))).tp_has_avx512())"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["0", "0"]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_structs_of_python_and_c_have_the_same_sizes(library_path: Path) -> None:
    lib = library.load(library_path)
    assert lib.tp_struct_bytes(-1) == lib.tp_struct_bytes(6) == -1
    assert lib.tp_has_avx512() in (0, 1)


def test_compiling_is_logged_once(
    tmp_path: Path, fake_compiler: FakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = fake_compiler()
    with caplog.at_level(logging.INFO, "twinpane.kernels"):
        build(tmp_path / "cache", (), compiler)
        build(tmp_path / "cache", (), compiler)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "event=kernels_compiling",
        "event=kernels_compiled",
    ]
