"""The servers that are measured: how each is started, what it must be told so that all do the same work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environments import ROOT, CouldNotRun, ensure, preloads
from bench.weights import Weights

CONTEXT_TOKENS = 8192
START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
FOREIGN_VARIABLES = ("TWINPANE_", "VLLM_", "OMP_", "KMP_", "MKL_")
"""What a shell may have set for other purposes must not reach a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """top_k and min_p are switched off everywhere, since servers differ in their defaults."""

    name: str
    temperature: float
    top_p: float

    def body(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0, "min_p": 0.0}


SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(name="greedy", temperature=0.0, top_p=1.0),
    "sampled": Sampling(name="sampled", temperature=0.8, top_p=0.95),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one server runs: its environment's folder, the weights, the port, and how many cores it may use."""

    home: Path
    weights: Weights
    port: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """bytes_per_weight: what one weight costs to read. ceiling: the GEMM rate that bounds its prefill. batches: whether
    it runs several requests at once; one that does not is left out of the concurrent rows, and the report says so.

    extra(sampling) are fields beyond those that everybody gets; None takes one of those away.
    """

    name: str
    label: str
    environment: str | None
    bytes_per_weight: float
    ceiling: str
    command: Callable[[Place], list[str]]
    variables: Callable[[Place], dict[str, str]] = lambda place: {}
    model_name: Callable[[Place], str] = lambda place: "m"
    extra: Callable[[Sampling], dict[str, Any]] = lambda sampling: {}
    batches: bool = True


def ours(*flags: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [
            *(sys.executable, "-m", "server", "serve", str(place.weights.hf_folder), "--served-model-name", "m"),
            *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--threads", str(place.threads)),
            *("--kv-cache-memory-bytes", "2GiB", "--generation-config", "none", "--log-level", "warning"),
            *("--port", str(place.port), *flags),
        ]

    return command


def vllm(place: Place) -> list[str]:
    return [
        *(str(place.home / "bin" / "vllm"), "serve", str(place.weights.hf_folder), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(place.port), "--dtype", "bfloat16"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--generation-config", "vllm"),
    ]


def vllm_variables(place: Place) -> dict[str, str]:
    return {
        "LD_PRELOAD": preloads(place.home),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place.home / "vllm-cache"),
    }


def transformers(place: Place) -> list[str]:
    return [
        *(str(place.home / "bin" / "transformers"), "serve", str(place.weights.hf_folder)),
        *("--device", "cpu", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(place.port)),
    ]


def transformers_extra(sampling: Sampling) -> dict[str, Any]:
    """It refuses fields that it does not know, and takes their meaning here; it samples only when told so."""
    config = {"eos_token_id": None, "pad_token_id": 0, "do_sample": sampling.temperature > 0, "top_k": 0}
    unknown = dict.fromkeys(("ignore_eos", "top_k", "min_p"))
    return {**unknown, "generation_config": json.dumps(config)}


def llama_cpp(file: Callable[[Weights], Path]) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [
            *(str(place.home / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(file(place.weights))),
            *("--model_alias", "m", "--host", "127.0.0.1", "--port", str(place.port)),
            *("--n_ctx", str(CONTEXT_TOKENS), "--n_threads", str(place.threads)),
            *("--n_threads_batch", str(place.threads), "--interrupt_requests", "false", "--verbose", "false"),
            *("--logits_all", "false"),  # its default computes the head for every token of a prompt
        ]

    return command


PEERS: Mapping[str, Peer] = {
    each.name: each
    for each in (
        Peer(
            name="ours",
            label="Twinpane bf16",
            environment=None,
            bytes_per_weight=2.0,
            ceiling="bf16",
            command=ours(),
        ),
        Peer(
            name="ours-int8",
            label="Twinpane int8",
            environment=None,
            bytes_per_weight=1.0,
            ceiling="int8",
            command=ours("--quantization", "int8"),
        ),
        Peer(
            name="vllm",
            label="vLLM-CPU bf16",
            environment="vllm-cpu",
            bytes_per_weight=2.0,
            ceiling="bf16",
            command=vllm,
            variables=vllm_variables,
        ),
        Peer(
            name="transformers",
            label="transformers serve bf16",
            environment="transformers",
            bytes_per_weight=2.0,
            ceiling="bf16",
            command=transformers,
            variables=lambda place: {"OMP_NUM_THREADS": str(place.threads)},
            model_name=lambda place: str(place.weights.hf_folder),
            extra=transformers_extra,
        ),
        Peer(
            name="llamacpp",
            label="llama.cpp bf16",
            environment="llama-cpp",
            bytes_per_weight=2.0,
            ceiling="bf16",
            command=llama_cpp(lambda weights: weights.bf16_gguf),
            batches=False,
        ),
        Peer(
            name="llamacpp-q8",
            label="llama.cpp Q8_0",
            environment="llama-cpp",
            bytes_per_weight=34 / 32,  # 32 weights share one fp16 scale
            ceiling="int8",
            command=llama_cpp(lambda weights: weights.q8_gguf),
            batches=False,
        ),
    )
}


@dataclass
class Running:
    """A server that answers. ready_s: from exec to the first answer of /v1/models."""

    url: str
    model_name: str
    pid: int
    started_s: float
    ready_s: float
    log: Path
    extra: Callable[[Sampling], dict[str, Any]] = field(repr=False, default=lambda sampling: {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_servers_when_terminated() -> None:
    """SIGTERM unwinds the stack as Ctrl-C does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


@contextlib.contextmanager
def running(peer: Peer, weights: Weights, *, cache: Path, threads: int) -> Iterator[Running]:
    """The server, started and ready; its whole process group is gone at the end. CouldNotRun says why it is not."""
    home = ROOT if peer.environment is None else ensure(peer.environment, cache / "peers")
    place = Place(home=home, weights=weights, port=free_port(), threads=threads)
    command = peer.command(place)
    log = cache / "bench" / f"{weights.name}-{peer.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_VARIABLES)}
    variables = {"HF_HUB_OFFLINE": "1", **peer.variables(place)}
    with log.open("w", encoding="utf-8") as out:
        started_s = time.monotonic()
        # A group, so that its children end with it, but no session of its own: Linux shares processors out by session,
        # so on a busy machine it would have more of them than what is measured inside this process.
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=out, env=clean | variables, process_group=0
            )
        except OSError as error:
            raise CouldNotRun(f"{command[0]}: {error.strerror}") from error
    try:
        url = f"http://127.0.0.1:{place.port}/v1"
        while not _answers(f"{url}/models"):
            if process.poll() is not None:
                raise CouldNotRun(f"ended with exit code {process.returncode} at start: {last_words(log)}")
            if time.monotonic() - started_s > START_LIMIT_S:
                raise CouldNotRun(f"not ready after {START_LIMIT_S:.0f} s: {last_words(log)}")
            time.sleep(0.05)
        ready_s = time.monotonic() - started_s
        yield Running(
            url=url,
            model_name=peer.model_name(place),
            pid=process.pid,
            started_s=started_s,
            ready_s=ready_s,
            log=log,
            extra=peer.extra,
        )
    finally:
        stop(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def last_words(log: Path, characters: int = 200) -> str:
    """The line of the log that says most: the last one that speaks of an error, else the last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["its log is empty"])[-1][:characters]


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group it leads, SIGKILL to what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
