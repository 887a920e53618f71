"""What loading costs: seconds, memory at its peak, and the time from a command to the first token over HTTP.

    python -m bench.loading smollm2-135m gemma3-270m

Each model is loaded from its GGUF file and from a bf16 folder of the same weights, in bf16 and in int8, each in a
process of its own. The memory of loading is the peak over what the process had before (imports, tokenizer), beside what
the weights take at rest: 1.00x is as good as it can be. Pages of the files that stay mapped count. The arena is
allocated, but its pages are not touched before they are used; the peak with it is given for the whole arena.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from server.config import ModelConfig

CLEAR_PEAK = "5"
"""What resets VmHWM when it is written to clear_refs (proc(5))."""

_READY = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """base_bytes: resident after imports and the model's description, before any weight is read."""

    imports_s: float
    describe_s: float
    load_s: float
    load_cpu_s: float
    base_bytes: int
    peak_bytes: int
    after_bytes: int
    weight_bytes: int
    arena_bytes: int

    def line(self, name: str) -> str:
        growth, kept = self.peak_bytes - self.base_bytes, self.after_bytes - self.base_bytes
        whole = (growth + self.arena_bytes) / (self.weight_bytes + self.arena_bytes)
        at_peak = f"{growth / self.weight_bytes:.2f}x, with the arena {whole:.2f}x"
        return (
            f"{name:<36} load {self.load_s:5.2f} s ({self.load_cpu_s:.2f} s CPU)  "
            f"weights {_mib(self.weight_bytes)}  peak +{_mib(growth)} ({at_peak})  "
            f"kept +{_mib(kept)} ({kept / self.weight_bytes:.2f}x)  base {_mib(self.base_bytes)}  "
            f"imports {self.imports_s:.2f} s  description {self.describe_s:.2f} s"
        )


def measure(model: str, quantization: str) -> Load:
    """Load `model` here and now: for a process that has done nothing else."""
    started_s = time.perf_counter()
    from server import assemble
    from server.config import read_config
    from server.model.source import resolve

    imports_s = time.perf_counter() - started_s
    config = read_config([model, "--quantization", quantization], {})
    described = assemble.describe(config, resolve(model, cache_folder=config.model.cache_folder))
    described.text.result()  # made beside loading otherwise: its memory is no weight's
    describe_s = time.perf_counter() - started_s - imports_s
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    base = _status_bytes("VmRSS")
    loading_s, loading_cpu_s = time.perf_counter(), time.process_time()
    runner = assemble._load(config, described)
    load = Load(
        imports_s=imports_s,
        describe_s=describe_s,
        load_s=time.perf_counter() - loading_s,
        load_cpu_s=time.process_time() - loading_cpu_s,
        base_bytes=base,
        peak_bytes=_status_bytes("VmHWM"),
        after_bytes=_status_bytes("VmRSS"),
        weight_bytes=described.memory.weight_bytes,
        arena_bytes=described.memory.kv_bytes,
    )
    del runner
    return load


def first_token(model: str) -> tuple[float, float]:
    """Seconds from the command to its ready line, and to the first token of a streamed completion."""
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "server", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            port = next(found[1] for line in server.stdout if (found := _READY.search(line)))
            ready_s = time.perf_counter() - started_s
            url = f"http://127.0.0.1:{port}/v1"
            name = json.load(urllib.request.urlopen(f"{url}/models"))["data"][0]["id"]
            body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 1, "stream": True})
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/completions", body.encode(), headers)
            ) as response:
                response.readline()
            return ready_s, time.perf_counter() - started_s
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--one", action="store_true", help="load one model in this process and print JSON")
    parser.add_argument("--quantization", default="none", help="with --one: none or int8")
    parser.add_argument("--runs", type=int, default=3)
    wanted = parser.parse_args()
    if wanted.one:
        print(json.dumps(asdict(measure(wanted.models[0], wanted.quantization))))
        return
    from bench.weights import prepare  # which imports torch: what one load imports is counted

    cache = Path(ModelConfig().cache_folder).expanduser()
    print(f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}")
    for model in wanted.models:
        folder = str(prepare(model, cache).hf_folder)
        for name, path in ((f"{model} (GGUF)", model), (f"{model} (bf16 folder)", folder)):
            for quantization in ("none", "int8") * wanted.runs:
                print(_in_a_process(path, quantization).line(f"{name} {quantization}"), flush=True)
        for _ in range(wanted.runs):
            ready_s, token_s = first_token(model)
            print(f"{model:<36} ready after {ready_s:.2f} s, first token after {token_s:.2f} s", flush=True)


def _in_a_process(model: str, quantization: str) -> Load:
    command = [sys.executable, "-m", "bench.loading", "--one", model, "--quantization", quantization]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as the command line sets it, before torch is imported
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, check=True
    )
    return Load(**json.loads(done.stdout.splitlines()[-1]))


def _status_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
