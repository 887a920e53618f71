"""The assembly: what a folder's files decide, what a lack of memory says, and how a broken device ends the process."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.native.build import BuildError
from kernels.native.kernels import NativeKernels
from server import assemble
from server.api.serve import SIGNAL_ECHO_S
from server.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from server.errors import StartupError
from server.model.source import resolve
from server.request import Conversation, Message
from tests.model.checkpoints import write_checkpoint
from tests.model.folders import VOCAB, write_companions, write_tokenizer, write_xiaomi
from tests.processes import Served, serving


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_xiaomi(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def folder(weights: Path, tmp_path: Path) -> Path:
    """A whole model whose files a test may change."""
    model = tmp_path / "model"
    model.mkdir()
    for file in weights.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    write_companions(model)
    return model


def config_of(folder: Path, **model: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(model=str(folder), **model),
        cache=CacheConfig(kv_bytes=64 * 2**20),
        scheduler=SchedulerConfig(max_sequences=4),
        device="cpu",
    )


def describe(folder: Path, **model: Any) -> assemble.Model:
    source = resolve(str(folder), cache_folder="/nonexistent", tokenizer=model.get("tokenizer"))
    return assemble.describe(config_of(folder, **model), source)


def test_a_tokenizer_from_elsewhere_is_given_by_folder_or_by_file(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "tokenizer.json").rename(elsewhere / "tokenizer.json")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    for path in (elsewhere, elsewhere / "tokenizer.json"):
        tokenizer, _ = describe(folder, tokenizer=str(path)).text.result()
        assert tokenizer.vocab_size == 320
        assert {7, 9} <= tokenizer.stop_token_ids, "what ends a text is the model's own"
    for path, said in (
        (tmp_path / "typo", "--tokenizer: .*typo does not exist"),
        (folder / "config.json", r"--tokenizer: .*config\.json is neither a folder nor a tokenizer\.json"),
        (folder, r"model has no tokenizer\.json"),
    ):
        with pytest.raises(StartupError, match=said):
            describe(folder, tokenizer=str(path))


def test_what_is_wrong_with_a_slow_tokenizer_ends_the_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made while weights are read, and nobody should wait for all of them before it is refused."""
    described = threading.Event()

    def slow(*_: object) -> None:
        assert described.wait(30)
        raise StartupError("no such tokenizer")

    def load(*arguments: Any, **_: object) -> None:
        described.set()
        while True:
            arguments[4](0)
            time.sleep(0.001)

    monkeypatch.setattr(assemble, "TOKENIZER_WAIT_S", 0.0)
    monkeypatch.setattr(assemble, "_tokenizer", slow)
    monkeypatch.setattr(assemble, "load_weights", load)
    model = describe(folder)
    with pytest.raises(StartupError, match="no such tokenizer"):
        assemble.build(config_of(folder), model)


@pytest.mark.parametrize("jinja", [True, False], ids=["file", "list"])
def test_a_folders_template_in_either_form(folder: Path, jinja: bool) -> None:
    (folder / "chat_template.jinja").unlink()
    write_companions(folder, jinja=jinja)
    tokenizer, template = describe(folder).text.result()
    assert template is not None
    chat = Conversation(messages=(Message(role="user", texts=("hi",)),), add_generation_prompt=True)
    tokens = template.encode(chat, limit_s=1.0)
    assert tokenizer.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_dtype_is_the_checkpoints_own_where_the_processor_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe(folder).dtype == torch.float32
    assert describe(folder, dtype="bfloat16").dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert describe(folder).dtype == torch.bfloat16

    def no_compiler(*_: object) -> None:
        raise BuildError("no C compiler: install gcc, or set CC")

    monkeypatch.setattr(assemble, "_native", no_compiler)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda fast=fast: fast)
        model = describe(folder)
        assert model.dtype == dtype
        assert model.memory.dtype == str(dtype).removeprefix("torch.")
    assert describe(folder, dtype="float16").dtype == torch.float16


def test_the_compiler_of_the_configuration_makes_the_native_kernels(folder: Path) -> None:
    config = replace(config_of(folder, dtype="bfloat16"), kernels="native", c_compiler="no-such-compiler -O2")
    with pytest.raises(StartupError, match=r"^--kernels native: the C compiler 'no-such-compiler -O2' is not there"):
        assemble.describe(config, resolve(str(folder), cache_folder="/nonexistent"))


@pytest.mark.parametrize("said", ["no memory for the threads of the C kernels", ""])
def test_native_kernels_that_get_no_memory_are_refused_or_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError(said)

    monkeypatch.setattr(assemble, "NativeKernels", type("NativeKernels", (), {"__init__": no_memory}))
    source, config = resolve(str(folder), cache_folder="/nonexistent"), config_of(folder, dtype="bfloat16")
    said = said or "no memory to make them"
    with pytest.raises(StartupError, match=f"^--kernels native: {said}$"):
        assemble.describe(replace(config, kernels="native"), source)
    int8 = replace(config, model=replace(config.model, quantization="int8"))
    with pytest.raises(StartupError, match=f"^--quantization int8 needs the native kernels: {said}$"):
        assemble.describe(int8, source)
    assert caplog.messages == []
    assert not isinstance(assemble.describe(config, source).kernels, assemble.NativeKernels)
    assert caplog.messages == [f"event=native_kernels_missing reason={said!r} fallback=torch"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_of_the_folder_is_one_line_that_names_it(folder: Path, name: str) -> None:
    for content in ("{", "[]" if name != "tokenizer_config.json" else "{"):
        (folder / name).write_text(content)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(StartupError, match=name) as caught:
            describe(folder)
        assert "\n" not in str(caught.value)


def raising(error: Exception) -> Callable[..., Any]:
    def arena(*_: object) -> Any:
        raise error

    return arena


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("Unable to allocate 64.0 MiB\nmore"), r"\(Unable to allocate 64\.0 MiB\)"),
        (MemoryError(), r"\(MemoryError\)"),
        (torch.OutOfMemoryError("CUDA out of memory"), r"\(CUDA out of memory\)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
    ],
)
def test_memory_that_was_promised_and_is_not_there_names_the_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(assemble, "KVArena", raising(error))
    with pytest.raises(StartupError, match=said) as caught:
        assemble.build(config_of(folder), describe(folder))
    assert "lower --kv-cache-memory-bytes or --gpu-memory-utilization" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_other_failure_to_load_is_not_called_a_lack_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "KVArena", raising(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        assemble.build(config_of(folder), describe(folder))


def complete(served: Served) -> int:
    body = {"model": "model", "prompt": "a", "max_tokens": 4}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=30).status_code


def wait_for(served: Served, said: str) -> None:
    deadline = time.monotonic() + 20
    while said not in served.output():
        assert served.process.poll() is None, served.output()
        assert time.monotonic() < deadline, served.output()
        time.sleep(0.05)


BROKEN_DEVICE = """
from server.model.runner import ModelRunner
def lost(self, *_):
    raise RuntimeError("the device is lost")
ModelRunner.run = ModelRunner.check = lost
"""

HANGING_DEVICE = """
import threading
from server import assemble
from server.model.runner import ModelRunner
assemble.STOP_LIMIT_S = 0.5
ModelRunner.run = lambda self, plan, begun: print("the step hangs", flush=True) or threading.Event().wait()
"""


def test_a_device_that_fails_every_step_ends_the_process_with_code_1(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", "--kv-cache-memory-bytes", "64M", sabotage=BROKEN_DEVICE) as served:
        statuses = []
        for _ in range(8):
            try:
                statuses.append(complete(served))
            except httpx.TransportError:
                break
        assert statuses
        assert set(statuses) <= {500, 503}
        assert served.process.wait(20) == 1
        assert "event=engine_failed" in served.output()


def test_a_step_that_hangs_does_not_keep_the_process_from_its_end(folder: Path, tmp_path: Path) -> None:
    flags = ("--kv-cache-memory-bytes", "64M", "--shutdown-timeout", "0.2")
    with serving(folder, tmp_path / "log", *flags, sabotage=HANGING_DEVICE) as served:
        asking = threading.Thread(target=lambda: complete(served))
        asking.start()
        wait_for(served, "the step hangs")
        assert served.stop(limit_s=20) == 1
        asking.join(20)
        assert not asking.is_alive()
        assert "event=exit code=1 reason=step_hangs" in served.output()
        assert "Traceback" not in served.output()


def ask_in_vain(served: Served) -> None:
    with pytest.raises(httpx.TransportError):
        complete(served)


def test_a_second_interrupt_ends_the_process_at_once_with_code_130(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", "--kv-cache-memory-bytes", "64M", sabotage=HANGING_DEVICE) as served:
        asking = threading.Thread(target=ask_in_vain, args=(served,))
        asking.start()
        for said in ("the step hangs", "event=drain"):
            wait_for(served, said)
            time.sleep(2 * SIGNAL_ECHO_S)
            served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 130
        asking.join(20)
        assert not asking.is_alive()


@pytest.mark.parametrize("odd", [False, True])
def test_weights_that_take_more_than_planned_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kernels_cache: Path, odd: bool
) -> None:
    """12 bits a weight are planned where the processor has them; weights of all exponents take 16."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": VOCAB, **sizes, "rms_norm_eps": 1e-5}
    model = LlamaForCausalLM(LlamaConfig(**config)).bfloat16()
    if odd:
        for tensor in model.state_dict().values():
            tensor.mul_(torch.exp2(torch.randint(-90, 1, tensor.shape)))
    write_checkpoint(tmp_path, {**config, "max_position_embeddings": 512}, dict(model.state_dict()))
    write_tokenizer(tmp_path)
    write_companions(tmp_path)
    with mock.patch("server.assemble._native", return_value=NativeKernels(kernels_cache, 1, bf12=True)):
        assemble.build(config_of(tmp_path), describe(tmp_path, dtype="bfloat16"))
    assert ("event=weights_larger_than_planned" in caplog.text) == odd
