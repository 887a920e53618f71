from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.processes import Served, serving


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 in fp32, shared by tests that leave it as they found it; it must end cleanly."""
    log = tmp_path_factory.mktemp("serve") / "smollm2.log"
    with serving("smollm2-135m", log, "--dtype", "float32", "--max-num-seqs", "16") as served:
        yield served
        assert served.stop() == 0, served.output()
        assert "Traceback" not in served.output()
