"""The one file that knows every concrete class: from a configuration to a running server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from kernels.cpu import CpuKernels
from kernels.interface import Kernels
from kernels.native.build import BuildError
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from server.api.app import build_app
from server.api.context import ApiContext
from server.api.serve import address_of, new_event_loop
from server.api.serve import serve as serve_http
from server.cache.kv_cache import KVCache
from server.config import ModelConfig, ServeConfig
from server.engine import InferenceEngine
from server.errors import StartupError
from server.memory_plan import MemoryPlan, available_bytes, plan_memory
from server.metrics import Metrics
from server.model.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from server.model.decoder import Decoder
from server.model.families import count_mtp_layers, spec_from_config, spec_from_gguf
from server.model.generation import GenerationConfig, read_generation_config
from server.model.gguf_file import GGUFFile
from server.model.json_file import read_json_object
from server.model.kv_arena import KVArena
from server.model.native_decoder import NativeDecoder, check_native
from server.model.runner import ModelRunner
from server.model.source import ModelSource
from server.model.spec import ModelSpec
from server.model.weights import Weights, checkpoint_bytes, held_bytes, load_weights
from server.request import EngineState, SamplingDefaults
from server.scheduler.lanes import lane_names
from server.scheduler.scheduler import Scheduler
from server.text.chat_template import ChatTemplate
from server.text.family_templates import family_template
from server.text.service import TextService
from server.text.tokenizer import Tokenizer

log = logging.getLogger("twinpane")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Text = tuple[Tokenizer, ChatTemplate | None]

TOKENIZER_WAIT_S = 0.5
"""How long a description waits for its tokenizer: most are made by then, and most of what is wrong is found."""

MORE_THAN_PLANNED = 1.25
"""Times the planned memory of weights: beyond, the operator is told. Padding of panels, which the plan leaves out, is
less even of a tiny model; weights of which none fits in 12 bits are more."""

STOP_LIMIT_S = 10.0
"""How long the step that is on the device may take to end once everything else has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model described but not loaded: what can be refused without reading a weight has been.

    text: the tokenizer and the chat template. A big vocabulary takes seconds, so it may still be in the making; what is
    wrong with it then ends the loading, see `_load`.
    """

    source: ModelSource
    spec: ModelSpec
    checkpoint: Checkpoint
    text: Future[Text]
    generation: GenerationConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    memory: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The parts that a running server consists of."""

    engine: InferenceEngine
    cache: KVCache
    runner: ModelRunner
    text: TextService
    context: ApiContext


def serve(config: ServeConfig, sock: socket.socket, source: ModelSource) -> int:
    """Serve on a bound socket until told to stop. Returns the exit code: 0 clean, 1 when something of ours failed.

    Raises StartupError for what the operator must change.
    """
    logging.basicConfig(
        level=config.http.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    server = build(config, describe(config, source))

    async def run() -> None:
        await server.engine.start()
        app = build_app(server.context)
        _keep_for_good()
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_set_when_failed(server.engine, stopping))
            try:
                await serve_http(
                    app,
                    sock,
                    config.http,
                    server.engine,
                    started=lambda: print(_ready_line(server, address_of(sock)), flush=True),
                    stop=stopping,
                )
            finally:
                watch.cancel()
                ended = await server.engine.stop(STOP_LIMIT_S)
                server.text.close()
                if not ended:
                    _end_process(sock)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(run())
        except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
            return 1
    return 1 if server.engine.health().state is EngineState.FAILED else 0


def _keep_for_good() -> None:
    """What is loaded by now stays until the end, so the cyclic collector need not look at it again: that takes a tenth
    of a second each time, in which nobody else runs."""
    gc.collect()
    gc.freeze()


def _end_process(sock: socket.socket) -> NoReturn:
    """End with exit code 1 at once: the interpreter would wait for the device thread, which hangs."""
    log.critical("event=exit code=1 reason=step_hangs")
    sock.close()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


async def _set_when_failed(engine: InferenceEngine, stopping: asyncio.Event) -> None:
    await engine.failed()
    stopping.set()


def describe(config: ServeConfig, source: ModelSource) -> Model:
    """Read the model's description, check it against its files and divide memory."""
    wanted = config.model
    device = _device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    metadata: Mapping[str, Any]
    checkpoint: Checkpoint
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        metadata = file.metadata
        spec, checkpoint = spec_from_gguf(file, window_keys=wanted.window_keys), GGUFCheckpoint(file)
    else:
        metadata = read_json_object(source.path / "config.json")
        checkpoint = SafetensorsCheckpoint(source.path)
        mtp_layers = count_mtp_layers(checkpoint.tensors)
        spec = spec_from_config(metadata, mtp_layers=mtp_layers, window_keys=wanted.window_keys)
    generation = read_generation_config(
        source.path if source.kind == "hf" else None,
        source=wanted.generation_config,
        override=wanted.override_generation_config,
        config=metadata,
    )
    worker = ThreadPoolExecutor(1, "twinpane-tokenizer")
    text = worker.submit(_text, wanted, source, metadata, spec, generation)
    worker.shutdown(wait=False)
    kernels, dtype = _backend(config, spec, device)  # compiles, at the first start
    wait([text], timeout=TOKENIZER_WAIT_S)
    _refuse_bad_text(text)
    memory = plan_memory(  # names every missing or unused tensor
        spec,
        cache=config.cache,
        scheduler=config.scheduler,
        max_model_tokens=wanted.max_model_tokens,
        dtype=dtype,
        device=device,
        available=available_bytes(device),
        packed=isinstance(kernels, CpuKernels),
        panels=isinstance(kernels, NativeKernels),
        int8=wanted.quantization == "int8",
        bf12=isinstance(kernels, NativeKernels) and kernels.bf12,
        gathers=not isinstance(kernels, NativeKernels),
        native_threads=kernels.context.threads if isinstance(kernels, NativeKernels) else None,
        checkpoint=checkpoint,
    )
    return Model(
        source=source,
        spec=spec,
        checkpoint=checkpoint,
        text=text,
        generation=generation,
        dtype=dtype,
        device=device,
        kernels=kernels,
        memory=memory,
    )


def build(config: ServeConfig, model: Model) -> Server:
    """Load the weights and put the parts together. The engine is not started."""
    names = config.model.served_model_names or (model.source.name,)
    print(f"{names[0]}:\n{model.memory.table(str(model.source.path))}", flush=True)
    print(f"  {'kernels':<17} {model.kernels.description}", flush=True)
    print(f"  {'sampling defaults':<17} {_defaults(model.generation)}", flush=True)
    runner = _load(config, model)
    cache = KVCache(model.memory.layout, rebuild=runner.rebuild)
    metrics = Metrics(
        names[0],
        context_tokens=model.memory.context_tokens,
        lanes=lane_names(config.scheduler.lane_tokens),
    )
    engine = InferenceEngine(
        lambda on_end: Scheduler(config.scheduler, cache, context_tokens=model.memory.context_tokens, on_end=on_end),
        runner,
        vocab_size=model.spec.vocab,
        metrics=metrics,
    )
    tokenizer, template = model.text.result()
    text = TextService(tokenizer, template, context_tokens=model.memory.context_tokens)
    context = ApiContext(
        engine=engine,
        text=text,
        http=config.http,
        metrics=metrics,
        model_names=tuple(names),
        root=config.model.model,
        defaults=model.generation.sampling,
    )
    return Server(engine=engine, cache=cache, runner=runner, text=text, context=context)


def _load(config: ServeConfig, model: Model) -> ModelRunner:
    with tqdm(
        total=checkpoint_bytes(model.spec, model.checkpoint),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        mininterval=0.1 if sys.stderr.isatty() else 5.0,  # a log file gets few lines
    ) as bar:

        def progress(read_bytes: int) -> None:
            _refuse_bad_text(model.text)
            bar.update(read_bytes)

        try:
            weights = load_weights(
                model.spec,
                model.checkpoint,
                model.dtype,
                model.device,
                progress,
                model.kernels.pack,
                packing=model.kernels.packing if isinstance(model.kernels, NativeKernels) else None,
                embeds_from_head=isinstance(model.kernels, NativeKernels),
            )
            taken, planned = held_bytes(weights), model.memory.weight_bytes
            if taken > MORE_THAN_PLANNED * planned:  # weights whose exponents differ so much that 12 bits do not do
                log.warning("event=weights_larger_than_planned bytes=%d planned=%d", taken, planned)
            arena = KVArena(model.spec, model.memory.layout, model.dtype, model.device)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            cause = str(error).partition("\n")[0] or type(error).__name__
            raise StartupError(
                f"the system gave less memory than it said was there ({cause}); lower --kv-cache-memory-bytes or "
                "--gpu-memory-utilization"
            ) from error
    return ModelRunner(
        _decoder(model, weights),
        arena,
        slots=config.scheduler.max_sequences,
        context_tokens=model.memory.context_tokens,
    )


def _ready_line(server: Server, address: str) -> str:
    """What scripts look for and people try next."""
    name, limits = server.context.model_names[0], server.engine.limits
    where = f"--unix-socket {address[5:]} http://localhost" if address.startswith("unix:") else address
    return f"Ready: {name}, {limits.context_tokens:,} tokens of context. Try: curl {where}/v1/models"


def _defaults(generation: GenerationConfig) -> str:
    """What a request that does not say gets, as the operator reads it."""
    return ", ".join(f"{field.name} {getattr(generation.sampling, field.name):g}" for field in fields(SamplingDefaults))


def _text(
    wanted: ModelConfig, source: ModelSource, metadata: Mapping[str, Any], spec: ModelSpec, generation: GenerationConfig
) -> Text:
    tokenizer = _tokenizer(wanted, source, metadata, generation)
    if tokenizer.vocab_size > spec.vocab:
        log.warning("event=vocabulary_mismatch tokenizer=%d model=%d", tokenizer.vocab_size, spec.vocab)
    return tokenizer, _template(wanted, source, metadata, spec, tokenizer)


def _refuse_bad_text(text: Future[Text]) -> None:
    """Raise what went wrong, if that is known by now."""
    if text.done():
        text.result()


def _tokenizer(
    wanted: ModelConfig, source: ModelSource, metadata: Mapping[str, Any], generation: GenerationConfig
) -> Tokenizer:
    if wanted.tokenizer is not None:
        path = Path(wanted.tokenizer).expanduser()
        if not path.exists():
            raise StartupError(f"--tokenizer: {path} does not exist")
        if path.is_file() and path.name != "tokenizer.json":
            raise StartupError(f"--tokenizer: {path} is neither a folder nor a tokenizer.json")
        folder = path.parent if path.is_file() else path
        return Tokenizer.from_hf_folder(folder, end_token_ids=generation.end_token_ids)
    if source.kind == "gguf":
        return Tokenizer.from_gguf(metadata, end_token_ids=generation.end_token_ids)
    return Tokenizer.from_hf_folder(source.path, end_token_ids=generation.end_token_ids)


def _template(
    wanted: ModelConfig, source: ModelSource, metadata: Mapping[str, Any], spec: ModelSpec, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """--chat-template, then the model's own, then its family's."""
    text = wanted.chat_template
    if text is not None and "{" not in text:
        path = Path(text).expanduser()
        if not path.is_file():
            raise StartupError(f"--chat-template: {text!r} is no file and no template")
        text = path.read_text(encoding="utf-8")
    if text is None:
        # By model type before family: within one family MiMo-V2.5 thinks unless told otherwise, Flash does not.
        model_type = str(metadata.get("model_type", spec.family))
        text = _own_template(source, metadata) or family_template(model_type) or family_template(spec.family)
    return None if text is None else ChatTemplate(text, tokenizer)


def _own_template(source: ModelSource, metadata: Mapping[str, Any]) -> str | None:
    if source.kind == "gguf":
        return metadata.get("tokenizer.chat_template")
    jinja = source.path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    path = source.path / "tokenizer_config.json"
    if not path.is_file():
        return None
    template = read_json_object(path).get("chat_template")
    if isinstance(template, list):  # several named templates; tool use has its own name in old files
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise StartupError("--device cuda: this torch sees no CUDA device; install a CUDA build or use --device cpu")
    return torch.device(name)


def _decoder(model: Model, weights: Weights) -> Decoder | NativeDecoder:
    if isinstance(model.kernels, NativeKernels):
        return NativeDecoder(model.spec, weights, model.kernels)
    return Decoder(model.spec, weights, model.kernels)


def _backend(config: ServeConfig, spec: ModelSpec, device: torch.device) -> tuple[Kernels, torch.dtype]:
    """The kernels and the number format of the weights, chosen once.

    On a processor "auto" is bf16 in the C kernels, whatever 16-bit format the checkpoint has, and beside int8 weights
    in any case; then oneDNN in torch; then fp32, where torch would only emulate bf16.
    """
    wanted, int8 = DTYPES.get(config.model.dtype), config.model.quantization == "int8"
    if wanted is None and (device.type != "cpu" or (spec.dtype == "float32" and not int8)):
        wanted = DTYPES[spec.dtype]
    native: NativeKernels | None = None
    if device.type != "cpu":
        refusal = f"they run on a CPU, not on {device}"
    elif config.kernels == "torch":
        refusal = "leave out --kernels torch"
    elif wanted not in (None, torch.bfloat16):
        refusal = f"they compute in bfloat16, not in {str(wanted).removeprefix('torch.')}; add --dtype bfloat16"
    else:
        try:
            check_native(spec)
            native = _native(config, int8)
        except (BuildError, StartupError, MemoryError) as error:
            refusal = str(error) or "no memory to make them"
            if config.kernels == "auto" and not int8:
                log.warning("event=native_kernels_missing reason=%r fallback=torch", refusal)
    if native is not None:
        return native, torch.bfloat16
    if int8:
        raise StartupError(f"--quantization int8 needs the native kernels: {refusal}")
    if config.kernels == "native":
        raise StartupError(f"--kernels native: {refusal}")
    if device.type != "cpu":
        return ReferenceKernels(), wanted or DTYPES[spec.dtype]
    if wanted in (None, torch.bfloat16) and CpuKernels.available():
        return CpuKernels(), torch.bfloat16
    return ReferenceKernels(), wanted or torch.float32


def _native(config: ServeConfig, int8: bool) -> NativeKernels:
    folder = Path(config.model.cache_folder).expanduser() / "kernels"
    return NativeKernels(folder, config.threads, int8=int8, compiler=config.c_compiler)
