"""The C library compiled twice: for this processor, and in the plain C that processors without AVX512-BF16 run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from kernels.native import library
from kernels.native.build import BuildError, build
from kernels.native.kernels import NativeKernels

MakeKernels = Callable[..., NativeKernels]


@pytest.fixture(scope="session", params=["this-processor", "portable"])
def library_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    portable = request.param == "portable"
    try:
        defines = ("TP_PORTABLE",) if portable else ()
        path = build(tmp_path_factory.mktemp("kernels"), defines, os.environ.get("CC"))
        assert not portable or library.load(path).tp_has_avx512() == 0
        return path
    except BuildError as error:
        if "install gcc" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def make_kernels(library_path: Path) -> MakeKernels:
    """Kernels for a number of threads; those of equal arguments are shared."""

    @cache
    def make(threads: int = 1, *, int8: bool = False, bf12: bool | None = None) -> NativeKernels:
        with mock.patch("kernels.native.kernels.build", return_value=library_path):
            return NativeKernels(library_path.parent, threads, int8=int8, bf12=bf12)

    return make
