"""The one configuration tree: frozen, built and validated once, and the only reader of the environment.

Each part of the server receives its own branch. Sizes carry their unit in the name. `FLAGS` names every setting once:
its spelling, branch, field, kind and help. The command line, the environment, `--help` and the checks all come from it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from server.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to serve. `model` is a local folder, a GGUF file, a hub id or a short name; dtype "auto" is the checkpoint's
    own (bfloat16 for GGUF). window_keys overrides how many keys, itself included, a window layer sees. cache_folder
    holds what the server makes for itself (assembled models, compiled kernels) and may be deleted at any time."""

    model: str = "smollm2-135m"
    served_model_names: tuple[str, ...] = ()
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    max_model_tokens: int | None = None
    window_keys: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: str | None = None
    cache_folder: str = "~/.cache/twinpane"

    def __post_init__(self) -> None:
        check_branch(self, "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory. kv_bytes None means: what the model and `memory_fraction` of the device leave."""

    page_tokens: int = 16
    kv_bytes: int | None = None
    memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        check_branch(self, "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs next. forgiven_tokens_per_s: how much prefill work one second of waiting forgives; None is a
    sixteenth of what the device computes in a second. lane_tokens: where
    lanes of prompts begin, by tokens to compute. target_itl_ms: how long a step may take in which answers go on, 0 for
    any time. request_timeout_s 0 is none."""

    max_sequences: int = 64
    step_token_budget: int = 2048
    prefill_chunk_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 24
    policy: str = "uncached-first"
    forgiven_tokens_per_s: float | None = None
    lane_tokens: tuple[int, ...] = (64 * 1024, 256 * 1024, 1024 * 1024)
    target_itl_ms: float = 100.0
    request_timeout_s: float = 0.0
    prefix_caching: str = "on"

    def __post_init__(self) -> None:
        check_branch(self, "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and how to listen. uds, where given, replaces host and port. sse_keep_alive_s 0 sends no comments."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 120.0
    sse_keep_alive_s: float = 10.0
    max_body_bytes: int = 16 * 1024 * 1024
    max_logprobs: int = 20
    max_choices: int = 128
    health_timeout_s: float = 60.0
    log_level: str = "info"
    overload_status: int = 429
    admin_api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_branch(self, "http")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The tree. device is "cpu", "cuda" or "auto"; kernels "auto", "native" or "torch"; c_compiler None is gcc or cc;
    threads None leaves torch's own choice."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    device: str = "auto"
    kernels: str = "auto"
    c_compiler: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_branch(self, "")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a setting is read and what it may be. Both functions raise ValueError with a clause that follows the flag's
    name: `parse` on text that means nothing, `check` on a value out of bounds."""

    metavar: str
    parse: Callable[[str], Any]
    check: Callable[[Any], None] = lambda value: None
    several: bool = False


SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}


def parse_count(text: str) -> int:
    """'4096', '32k' (thousands), '32K' or '2GiB' (powers of two): the letters mean what they mean in vLLM."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*(?:([kmgt])|([KMGT])(?:iB)?)?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a count (examples: 4096, 32k = 32,000, 32K = 32,768, 2G)")
    scaled = float(found[1]) * SCALES[found[2] or found[3] or ""]
    if not scaled.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(scaled)


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def count(metavar: str, *, least: int, most: int | None = None, optional: tuple[str, ...] = ()) -> Kind:
    """A whole number in [least, most]; the words in `optional` mean None."""

    def parse(text: str) -> int | None:
        return None if text.lower() in optional else parse_count(text)

    def check(value: int | None) -> None:
        if value is not None and (value < least or (most is not None and value > most)):
            raise ValueError(f"{value} is not {f'at least {least}' if most is None else f'between {least} and {most}'}")

    return Kind(metavar=metavar, parse=parse, check=check)


def number(metavar: str, *, least: float, optional: tuple[str, ...] = ()) -> Kind:
    """A finite number from `least` on; the words in `optional` mean None."""

    def parse(text: str) -> float | None:
        return None if text.lower() in optional else parse_number(text)

    def check(value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ValueError(f"{value:g} is not a number of at least {least:g}")

    return Kind(metavar=metavar, parse=parse, check=check)


def choice(*options: str) -> Kind:
    def check(value: str) -> None:
        if value not in options:
            close = difflib.get_close_matches(value, options, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{value!r} is not one of {', '.join(options)}{hint}")

    return Kind(metavar="{" + ",".join(options) + "}", parse=str.lower, check=check)


MOST_SEQUENCES = 65_536
MOST_THREADS = 256
"""What the pool of the native kernels holds: MAX_THREADS of kernels/native/csrc/pool.h."""


def check_text(value: str | None) -> None:
    if value == "":
        raise ValueError("is empty")


def string(metavar: str) -> Kind:
    return Kind(metavar=metavar, parse=str, check=check_text)


def check_names(value: tuple[str, ...]) -> None:
    if not all(name.strip() for name in value):
        raise ValueError("holds an empty name")


def check_fraction(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{value:g} is not above 0 and at most 1")


def check_json_object(value: str | None) -> None:
    if value is None:
        return
    try:
        loaded = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{value!r} is not a JSON object")


SOCKET_PATH_LIMIT_BYTES = 107
"""Linux keeps a socket's path, with its closing zero, in 108 bytes (unix(7))."""


def check_socket_path(value: str | None) -> None:
    check_text(value)
    if value is not None and len(value.encode()) > SOCKET_PATH_LIMIT_BYTES:
        raise ValueError(f"a socket's path may be {SOCKET_PATH_LIMIT_BYTES} bytes long, this one is too long")


NAMES = Kind(
    metavar="NAME", parse=lambda text: tuple(re.split(r"[,\s]+", text.strip())), check=check_names, several=True
)


def check_ascending(value: tuple[int, ...]) -> None:
    if any(each < 1 for each in value) or any(one >= other for one, other in pairwise(value)):
        raise ValueError(f"{','.join(map(str, value))!r} is not counts from 1 that ascend")


COUNTS = Kind(
    metavar="N,N",
    parse=lambda text: (
        () if text.strip() == "none" else tuple(parse_count(each) for each in re.split(r"[,\s]+", text.strip()) if each)
    ),
    check=check_ascending,
)


def check_overload_status(value: int) -> None:
    if value not in (429, 503):
        raise ValueError(f"{value} is not one of 429, 503")


def check_api_key(value: str | None) -> None:
    check_text(value)
    if value is not None and (value != value.strip() or not value.isprintable()):
        raise ValueError("a key that a header can carry has no blanks around it and no control characters")


API_KEY = Kind(metavar="KEY", parse=str, check=check_api_key)
OVERLOAD_STATUS = Kind(metavar="{429,503}", parse=parse_count, check=check_overload_status)
FRACTION = Kind(metavar="F", parse=parse_number, check=check_fraction)
JSON_OBJECT = Kind(metavar="JSON", parse=str, check=check_json_object)
SOCKET_PATH = Kind(metavar="PATH", parse=str, check=check_socket_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting: `branch.field` of the tree ("" is the root). `names` are its spellings, first the real one."""

    names: tuple[str, ...]
    branch: str
    field: str
    kind: Kind
    help: str

    @property
    def env(self) -> str:
        return "TWINPANE_" + self.names[0].removeprefix("--").upper().replace("-", "_")


def flag(names: str, path: str, kind: Kind, help: str) -> Flag:
    branch, _, field_name = path.rpartition(".")
    return Flag(names=tuple(names.split()), branch=branch, field=field_name, kind=kind, help=help)


GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Model": (
        flag(
            "--model --model-path",
            "model.model",
            string("MODEL"),
            "what to serve: a folder, a .gguf file, a hub id (org/name) or a short name; also the first argument",
        ),
        flag(
            "--served-model-name",
            "model.served_model_names",
            NAMES,
            "names that clients may use, the first is reported; by default the model's own",
        ),
        flag("--revision", "model.revision", string("REV"), "branch, tag or commit of a hub model"),
        flag(
            "--tokenizer",
            "model.tokenizer",
            string("PATH"),
            "a folder that holds a tokenizer.json, or that file, to use in place of the model's",
        ),
        flag(
            "--dtype",
            "model.dtype",
            choice("auto", "float32", "bfloat16", "float16"),
            "number format of the weights; auto is the checkpoint's own; on a CPU bfloat16 in place of float16, "
            "or float32 where bfloat16 is slow",
        ),
        flag(
            "--quantization",
            "model.quantization",
            choice("none", "int8"),
            "int8 rounds plain weights to 8 bits with one scale a row when they are loaded: a third to a half "
            "of the memory less and up to 1.5 times the speed of one answer on a CPU, see docs/quantization.md for "
            "what it costs; codes that the checkpoint itself holds (fp8, mxfp4) stay as they are",
        ),
        flag(
            "--max-model-len --context-length",
            "model.max_model_tokens",
            count("N", least=1, optional=("auto", "-1")),
            "longest prompt plus answer in tokens (32k, 1M); auto or -1 is the model's own limit",
        ),
        flag(
            "--window-keys",
            "model.window_keys",
            count("N", least=1, optional=("auto",)),
            "keys that a window layer sees, its own included; by default what the model says",
        ),
        flag("--chat-template", "model.chat_template", string("PATH|TEXT"), "a Jinja file, or the template itself"),
        flag(
            "--generation-config",
            "model.generation_config",
            string("auto|none|vllm|DIR"),
            "where sampling defaults come from: auto is the model's folder, none and vllm are neutral values",
        ),
        flag(
            "--override-generation-config",
            "model.override_generation_config",
            JSON_OBJECT,
            "sampling defaults that replace single ones, such as '{\"temperature\": 0.6}'",
        ),
        flag(
            "--cache-dir",
            "model.cache_folder",
            string("DIR"),
            "for files the server makes itself (assembled models, compiled kernels); hub models live in HF_HOME",
        ),
    ),
    "Memory": (
        flag("--block-size --page-size", "cache.page_tokens", count("N", least=1), "tokens in one page of KV"),
        flag(
            "--kv-cache-memory-bytes",
            "cache.kv_bytes",
            count("BYTES", least=1, optional=("auto",)),
            "memory for KV (2G, 512MiB); replaces --gpu-memory-utilization",
        ),
        flag(
            "--gpu-memory-utilization --mem-fraction-static",
            "cache.memory_fraction",
            FRACTION,
            "share of the device's memory for weights and KV together; on a CPU, of the memory available at start, and "
            "at most 4 GiB of KV",
        ),
    ),
    "Scheduling": (
        flag(
            "--max-num-seqs --max-running-requests",
            "scheduler.max_sequences",
            count("N", least=1, most=MOST_SEQUENCES),
            "sequences that run at once",
        ),
        flag(
            "--max-num-batched-tokens",
            "scheduler.step_token_budget",
            count("N", least=1),
            "tokens computed in one step, prompts and answers together",
        ),
        flag(
            "--long-prefill-token-threshold --chunked-prefill-size",
            "scheduler.prefill_chunk_tokens",
            count("N", least=1),
            "longest piece of one prompt in one step; smaller keeps other answers flowing, larger is faster alone",
        ),
        flag(
            "--max-num-queued-reqs",
            "scheduler.max_queued_requests",
            count("N", least=0),
            "requests that may wait; the next one gets 429 with Retry-After",
        ),
        flag(
            "--max-num-queued-tokens",
            "scheduler.max_queued_tokens",
            count("N", least=1),
            "tokens of prompts that may wait together; beyond them, 429 with Retry-After",
        ),
        flag(
            "--request-timeout",
            "scheduler.request_timeout_s",
            number("S", least=0),
            "end a request with an error when it takes longer than this, waiting included; 0 is never",
        ),
        flag(
            "--scheduling-policy --schedule-policy",
            "scheduler.policy",
            choice("uncached-first", "fcfs", "longest-prefix", "shortest-first"),
            "who runs next: uncached-first is who has the fewest tokens left to compute",
        ),
        flag(
            "--forgiven-tokens-per-s",
            "scheduler.forgiven_tokens_per_s",
            number("N", least=0.001, optional=("auto",)),
            "fairness: how many tokens of prompt one second of waiting makes up for; auto is a sixteenth of what is "
            "computed in a second",
        ),
        flag(
            "--length-lanes",
            "scheduler.lane_tokens",
            COUNTS,
            "where lanes of long prompts begin, by tokens to compute, or none; each lane has an equal part of the time "
            "that a step has for prompts",
        ),
        flag(
            "--target-itl-ms",
            "scheduler.target_itl_ms",
            number("MS", least=0),
            "prompts are computed in pieces so small that other answers wait about this long for their next token; "
            "0 is no bound",
        ),
        flag(
            "--prefix-caching",
            "scheduler.prefix_caching",
            choice("on", "off"),
            "keep what was computed for prompts that begin alike, as long as memory lasts",
        ),
    ),
    "HTTP": (
        flag("--host", "http.host", string("HOST"), "address to listen on; 0.0.0.0 or :: is every interface"),
        flag("--port", "http.port", count("N", least=0, most=65535), "0 takes a free one and prints it"),
        flag("--uds", "http.uds", SOCKET_PATH, "listen on this Unix socket, not on host and port"),
        flag(
            "--shutdown-timeout",
            "http.shutdown_timeout_s",
            number("S", least=0),
            "after SIGTERM, how long running answers may take to finish",
        ),
        flag(
            "--timeout-keep-alive",
            "http.keep_alive_s",
            number("S", least=0),
            "close an idle connection after this; keep it above that of the proxy in front",
        ),
        flag(
            "--sse-keep-alive-interval",
            "http.sse_keep_alive_s",
            number("S", least=0),
            "send a comment on a silent stream this often, so that proxies keep it open; 0 sends none",
        ),
        flag(
            "--max-logprobs", "http.max_logprobs", count("N", least=0), "most alternatives per token a request may ask"
        ),
        flag("--max-choices", "http.max_choices", count("N", least=1), "most choices (n) a request may ask"),
        flag(
            "--max-body-bytes", "http.max_body_bytes", count("BYTES", least=1024), "largest request body in bytes (16M)"
        ),
        flag(
            "--health-timeout",
            "http.health_timeout_s",
            number("S", least=0.1),
            "/health fails when the engine has work and made no progress for this long",
        ),
        flag(
            "--overload-status",
            "http.overload_status",
            OVERLOAD_STATUS,
            "how a full queue is answered; 503 is for routers that try another server on it only",
        ),
        flag(
            "--admin-api-key",
            "http.admin_api_key",
            API_KEY,
            "who sends it (Bearer or x-api-key) may flush the cache and look at requests; better given as "
            "TWINPANE_ADMIN_API_KEY, which other users of the machine cannot see",
        ),
        flag(
            "--log-level", "http.log_level", choice("debug", "info", "warning", "error", "critical"), "how much to log"
        ),
    ),
    "Device": (
        flag("--device", "device", choice("auto", "cpu", "cuda"), "where to run; auto is a GPU if there is one"),
        flag(
            "--kernels",
            "kernels",
            choice("auto", "native", "torch"),
            "on a CPU: native is C, compiled for this processor at first start (needs gcc); torch needs nothing; auto "
            "is native where it can be compiled",
        ),
        flag(
            "--c-compiler",
            "c_compiler",
            string("COMMAND"),
            'what compiles the native kernels, its arguments included (clang, "ccache gcc"); by default what the '
            "variable CC says, then gcc, then cc",
        ),
        flag(
            "--threads",
            "threads",
            count("N", least=1, most=MOST_THREADS, optional=("auto",)),
            f"CPU threads for the model, at most {MOST_THREADS}; by default what torch takes",
        ),
    ),
}

FLAGS: tuple[Flag, ...] = tuple(each for group in GROUPS.values() for each in group)
BY_NAME: Mapping[str, Flag] = {name: each for each in FLAGS for name in each.names}
BY_ENV: Mapping[str, Flag] = {each.env: each for each in FLAGS}
SWITCHES: Mapping[str, tuple[str, str]] = {
    "--enable-prefix-caching": ("--prefix-caching", "on"),
    "--no-enable-prefix-caching": ("--prefix-caching", "off"),
    "--disable-radix-cache": ("--prefix-caching", "off"),
}
"""Spellings of other servers that take no value, and what they stand for here."""

BRANCHES: Mapping[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "http": HttpConfig,
    "": ServeConfig,
}

KUBERNETES_SERVICE = re.compile(r"TWINPANE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Names that Kubernetes sets in every pod for a Service called twinpane or twinpane-something."""


def check_branch(config: Any, branch: str) -> None:
    """Refuse a value out of bounds, whoever built the branch, under its flag's name."""
    for each in FLAGS:
        if each.branch == branch:
            try:
                each.kind.check(getattr(config, each.field))
            except ValueError as error:
                raise StartupError(f"{each.names[0]}: {error}") from None


def read_config(argv: Sequence[str], env: Mapping[str, str]) -> ServeConfig:
    """What `twinpane serve` was asked for: the command line before the environment before the defaults.

    argv starts after `serve`. Raises StartupError with one line that names the flag or the variable.
    """
    chosen: dict[str, dict[str, Any]] = {branch: {} for branch in BRANCHES}
    if cache_root := env.get("XDG_CACHE_HOME"):
        chosen["model"]["cache_folder"] = f"{cache_root}/twinpane"
    if compiler := env.get("CC", "").strip():
        chosen[""]["c_compiler"] = compiler
    for each, origin, value in [*read_environment(env), *read_command_line(argv)]:
        try:
            parsed = each.kind.parse(value)
            each.kind.check(parsed)
        except ValueError as error:
            raise StartupError(f"{origin}: {error}") from None
        chosen[each.branch][each.field] = parsed
    branches = {name: BRANCHES[name](**chosen[name]) for name in BRANCHES if name}
    return ServeConfig(**branches, **chosen[""])


def read_environment(env: Mapping[str, str]) -> list[tuple[Flag, str, str]]:
    """(flag, variable, text) of each TWINPANE_ variable; an empty one counts as not set, an unknown one is refused."""
    settings = []
    for variable in sorted(name for name in env if name.startswith("TWINPANE_")):
        value = env[variable].strip()
        each = BY_ENV.get(variable)
        if each is None:
            if KUBERNETES_SERVICE.fullmatch(variable):
                continue
            close = difflib.get_close_matches(variable, BY_ENV, n=1)
            raise StartupError(f"{variable}: no such setting{f'; did you mean {close[0]}?' if close else ''}")
        if each.field == "port" and "://" in value:
            raise StartupError(
                f"{variable}: {value!r} is not a port but the address Kubernetes sets for a Service named twinpane; "
                "rename the Service or set enableServiceLinks: false"
            )
        if value:
            settings.append((each, variable, value))
    return settings


def read_command_line(argv: Sequence[str]) -> list[tuple[Flag, str, str]]:
    """(flag, spelling used, text) in the order given; later ones win. A bare argument is the model."""
    settings: list[tuple[Flag, str, str]] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-") or token == "-":
            settings.append((BY_NAME["--model"], "MODEL", token))
            continue
        spelling, equals, value = token.partition("=")
        name = "--" + spelling[2:].replace("_", "-") if spelling.startswith("--") else spelling
        if name in SWITCHES:
            if equals:
                raise StartupError(f"{spelling} takes no value")
            known, value = SWITCHES[name]
            settings.append((BY_NAME[known], spelling, value))
            continue
        each = BY_NAME.get(name)
        if each is None:
            close = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
            raise StartupError(
                f"unknown flag {spelling}{f'; did you mean {close[0]}?' if close else ''} (see twinpane serve --help)"
            )
        if not equals:
            taken = 0
            while taken < len(rest) and not rest[taken].startswith("--") and (taken == 0 or each.kind.several):
                taken += 1
            if not taken:
                raise StartupError(f"{spelling} needs a value ({each.kind.metavar})")
            value, rest = " ".join(rest[:taken]), rest[taken:]
        settings.append((each, spelling, value))
    models = {value for each, _, value in settings if each.field == "model"}
    if len(models) > 1:
        raise StartupError(f"one model only, not {' and '.join(sorted(models))}")
    return settings


def default_of(each: Flag) -> Any:
    return next(known.default for known in fields(BRANCHES[each.branch]) if known.name == each.field)


EXAMPLES = """\
Examples:
  twinpane serve tiny                                   a toy that comes along, needs no network
  twinpane serve smollm2-135m                           a small model that `make install` brings
  twinpane serve ./my-model --max-model-len 32k         a local folder, shorter context, less memory
  twinpane serve org/name --served-model-name mine      a hub model; HF_TOKEN, HF_HOME are honoured
  twinpane serve model.gguf --host 0.0.0.0 --port 9000  a GGUF file, reachable from other machines
  TWINPANE_PORT=9000 twinpane serve                     flags are variables too; the flag wins
"""


def as_text(value: Any) -> str:
    """A setting as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def help_text(width: int = 100) -> str:
    """`twinpane serve --help`: the table, grouped, with each setting's default and variable."""
    lines = ["usage: twinpane serve [MODEL] [flags]", "", "Serve MODEL over an OpenAI-compatible HTTP API.", ""]
    for group, flags in GROUPS.items():
        lines.append(f"{group}:")
        for each in flags:
            metavar = f"{each.kind.metavar} ..." if each.kind.several else each.kind.metavar
            default = default_of(each)
            shown = "" if default in (None, ()) else f" [{as_text(default)}]"
            lines.append(f"  {', '.join(each.names)} {metavar}")
            switches = [name for name, (known, _) in SWITCHES.items() if known in each.names]
            also = f"; also {', '.join(switches)}" if switches else ""
            lines += textwrap.wrap(
                f"{each.help}{also}{shown}", width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        lines.append("")
    lines += textwrap.wrap(
        "Default values stand in brackets. `_` and `-` are the same in a flag's name. Every flag is also read from "
        "TWINPANE_ and its first name in capitals (TWINPANE_MAX_MODEL_LEN). Other variables that are read: CC, "
        "XDG_CACHE_HOME (in place of ~/.cache), OMP_WAIT_POLICY, and HF_HOME, HF_TOKEN and HF_HUB_OFFLINE of the hub. "
        "Sizes take k, m, g (thousands) and K, M, G "
        "(powers of two). Exit codes: 0 clean, 1 the engine failed, 2 something to change before it can start, "
        "130 after a second Ctrl-C (143 SIGTERM).",
        width,
    )
    return "\n".join([*lines, "", EXAMPLES])
