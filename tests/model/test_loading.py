"""How weights are loaded: side by side, within a bound of memory, and without leaving the file's pages behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.quantized import Matrix
from server.errors import StartupError
from server.model.checkpoint import SafetensorsCheckpoint
from server.model.families import spec_from_config
from server.model.weights import _Budget, load_weights
from tests.model.checkpoints import PRO_CONFIG, pro_tensors, write_checkpoint
from tests.processes import environment

MIB = 2**20


def test_layers_are_packed_while_others_are_read(tmp_path: Path) -> None:
    """Two layers meet inside pack, which one thread alone could not do."""
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    together = threading.Barrier(2)
    met = threading.Event()

    def pack(matrix: Matrix) -> Matrix:
        if not met.is_set() and (os.cpu_count() or 1) > 1:
            together.wait(timeout=30)
            met.set()
        return matrix

    load_weights(spec_from_config(PRO_CONFIG, mtp_layers=3), SafetensorsCheckpoint(tmp_path), torch.float32, pack=pack)
    assert met.is_set() or os.cpu_count() == 1


def test_progress_is_reported_by_one_thread_at_a_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    inside = 0

    def progress(read_bytes: int) -> None:
        nonlocal inside
        inside += 1
        time.sleep(0.0002)
        assert inside == 1
        inside -= 1

    load_weights(
        spec_from_config(PRO_CONFIG, mtp_layers=3), SafetensorsCheckpoint(tmp_path), torch.float32, progress=progress
    )


def test_a_file_that_is_cut_short_while_it_is_read_ends_loading_in_one_line(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG), shards=2)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StartupError, match=r"00002\.safetensors: tensor .* cannot be read"):
        load_weights(spec_from_config(PRO_CONFIG, mtp_layers=3), checkpoint, torch.float32)


def test_what_pack_raises_ends_loading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    packed = []

    def pack(matrix: Matrix) -> Matrix:
        packed.append(matrix)
        if len(packed) == 5:
            raise MemoryError("no room for a copy")
        return matrix

    with pytest.raises(MemoryError, match="no room"):
        load_weights(
            spec_from_config(PRO_CONFIG, mtp_layers=3), SafetensorsCheckpoint(tmp_path), torch.float32, pack=pack
        )


def test_whoever_ends_loading_does_not_wait_for_what_others_still_read(tmp_path: Path) -> None:
    """A failure or an interrupt: big layers take minutes, and threads end at their next piece."""
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    pieces = 0

    def progress(read_bytes: int) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            raise MemoryError("no room")
        time.sleep(0.02)

    spec = spec_from_config(PRO_CONFIG, mtp_layers=3)
    with pytest.raises(MemoryError, match="no room"):
        load_weights(spec, SafetensorsCheckpoint(tmp_path), torch.float32, progress=progress)
    assert pieces < 12


def test_threads_hold_no_more_than_the_budget_together() -> None:
    budget, lock = _Budget(100), threading.Lock()
    held, most, alone = 0, 0, []

    def work(count: int) -> None:
        nonlocal held, most
        for _ in range(20):
            with budget.take(count):
                with lock:
                    held += count
                    most = max(most, held if count <= 100 else 0)
                    if count > 100:
                        alone.append(held == count)
                time.sleep(0.0005)
                with lock:
                    held -= count

    threads = [threading.Thread(target=work, args=(count,)) for count in (30, 40, 50, 250, 100, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert most <= 100
    assert all(alone)
    assert (held, budget.taken_bytes) == (0, 0)


LOAD = """
import json, re, sys
from pathlib import Path
import torch
from kernels.native.kernels import NativeKernels
from server.model.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from server.model.families import spec_from_config, spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.json_file import read_json_object
from server.model.weights import load_weights, weight_bytes

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

path = Path(sys.argv[1])
torch.randn(300, 300) @ torch.randn(300, 300)  # what a first product allocates is no weight
if path.is_dir():
    checkpoint = SafetensorsCheckpoint(path)
    spec = spec_from_config(read_json_object(path / "config.json"))
else:
    file = GGUFFile(path)
    checkpoint, spec = GGUFCheckpoint(file), spec_from_gguf(file)
before, files = status("VmRSS"), status("RssFile")
Path("/proc/self/clear_refs").write_text("5")
form = sys.argv[2]
kernels = NativeKernels(Path(sys.argv[3]), 1, int8=form == "int8", bf12=form == "bf12")
packing = None if form == "whole" else kernels.packing
weights = load_weights(spec, checkpoint, torch.bfloat16, packing=packing, embeds_from_head=packing is not None)
print(json.dumps({
    "peak": status("VmHWM") - before,
    "kept": status("VmRSS") - before,
    "mapped": status("RssFile") - files,
    "weights": weight_bytes(spec, torch.bfloat16, int8=form == "int8", bf12=form == "bf12"),
}))
"""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_llama(folder: Path, dtype: torch.dtype) -> None:
    """200 MB in bf16."""
    shapes = {f"self_attn.{part}_proj": (1024, 1024) for part in "qkvo"}
    shapes |= {"mlp.gate_proj": (4096, 1024), "mlp.up_proj": (4096, 1024), "mlp.down_proj": (1024, 4096)}
    tensors = {"model.embed_tokens.weight": torch.ones(1000, 1024), "model.norm.weight": torch.ones(1024)}
    for layer in range(6):
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(1024)
    write_checkpoint(folder, LLAMA, {name: tensor.to(dtype) for name, tensor in tensors.items()})


@pytest.mark.parametrize("stored", ["bfloat16", "float32", "gguf"])
@pytest.mark.parametrize("form", ["whole", "panels", "int8", "bf12"])
def test_loading_takes_little_more_memory_than_the_weights(
    tmp_path: Path, smollm2_gguf: Path, kernels_cache: Path, stored: str, form: str
) -> None:
    """Neither a second copy nor the file's pages, which would stay for as long as it is mapped. A matrix in panels is
    packed while it is read."""
    path = smollm2_gguf
    if stored != "gguf":
        path = tmp_path
        write_llama(tmp_path, getattr(torch, stored))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), form, str(kernels_cache)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak"] <= 1.15 * found["weights"] + 16 * MIB, found
    assert found["kept"] <= 1.05 * found["weights"] + 16 * MIB, found
    assert found["mapped"] < 16 * MIB, found
