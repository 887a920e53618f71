"""The one configuration tree: frozen, built and validated once, and the only reader of the environment.

Each part of the server receives its own branch. Sizes carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to serve. `model` is a local folder, a GGUF file, a hub id or a short name; dtype "auto" is the checkpoint's
    own (bfloat16 for GGUF). window_keys overrides how many keys, itself included, a window layer sees."""

    model: str = "smollm2-135m"
    served_model_names: tuple[str, ...] = ()
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_tokens: int | None = None
    window_keys: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory. kv_bytes None means: what the model and `memory_fraction` of the device leave."""

    page_tokens: int = 16
    kv_bytes: int | None = None
    memory_fraction: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs next. forgiven_tokens_per_s: how much prefill work one second of waiting forgives."""

    max_sequences: int = 64
    step_token_budget: int = 2048
    prefill_chunk_tokens: int = 512
    max_queued_requests: int = 1024
    forgiven_tokens_per_s: float = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 120.0
    sse_keep_alive_s: float = 10.0
    max_body_bytes: int = 64 * 1024 * 1024
    max_logprobs: int = 20
    max_choices: int = 128
    health_timeout_s: float = 60.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The tree. device is "cpu", "cuda" or "auto"; threads None leaves torch's own choice."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    device: str = "auto"
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How KV memory is cut, derived at start from the model and the memory that is left.

    The arena is `slab_count` slabs of `slab_bytes`. A slab holds pages of one kind at a time: full_pages_per_slab of
    full_page_bytes, or window_pages_per_slab of window_page_bytes, from its first byte on with no gap between pages.
    window_tokens is W, the number of earlier positions that a window layer sees (window keys minus the query itself).
    A model without window layers has window_page_bytes, window_pages_per_slab and window_tokens 0.
    """

    page_tokens: int
    window_tokens: int
    full_page_bytes: int
    window_page_bytes: int
    slab_bytes: int
    slab_count: int

    @property
    def full_pages_per_slab(self) -> int:
        return self.slab_bytes // self.full_page_bytes

    @property
    def window_pages_per_slab(self) -> int:
        return self.slab_bytes // self.window_page_bytes if self.window_page_bytes else 0

    @property
    def has_window(self) -> bool:
        return self.window_page_bytes > 0
