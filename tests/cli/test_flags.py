"""Every flag changes exactly its field, from the command line and from the environment, and refuses nonsense."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from server.config import (
    BRANCHES,
    FLAGS,
    MOST_THREADS,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
    as_text,
    help_text,
    read_config,
)
from server.errors import StartupError

# first name of the flag -> (text, value it must give, text that must be refused or None if any text is right)
CASES: dict[str, tuple[str, Any, str | None]] = {
    "--model": ("org/name", "org/name", ""),
    "--served-model-name": ("mine", ("mine",), ""),
    "--revision": ("v2", "v2", ""),
    "--tokenizer": ("/models/t", "/models/t", ""),
    "--dtype": ("float16", "float16", "int8"),
    "--quantization": ("int8", "int8", "int4"),
    "--max-model-len": ("32k", 32_000, "many"),
    "--window-keys": ("129", 129, "0"),
    "--chat-template": ("{{ messages }}", "{{ messages }}", ""),
    "--generation-config": ("none", "none", ""),
    "--override-generation-config": ('{"top_p": 0.5}', '{"top_p": 0.5}', "top_p=0.5"),
    "--cache-dir": ("/cache", "/cache", ""),
    "--block-size": ("32", 32, "0"),
    "--kv-cache-memory-bytes": ("2G", 2 * 1024**3, "2X"),
    "--gpu-memory-utilization": ("0.5", 0.5, "1.5"),
    "--max-num-seqs": ("7", 7, "0"),
    "--max-num-batched-tokens": ("8k", 8_000, "-5"),
    "--long-prefill-token-threshold": ("256", 256, "2.5"),
    "--max-num-queued-reqs": ("0", 0, "-1"),
    "--overload-status": ("503", 503, "500"),
    "--admin-api-key": ("secret", "secret", ""),
    "--max-num-queued-tokens": ("4M", 4 << 20, "0"),
    "--request-timeout": ("90", 90.0, "-1"),
    "--scheduling-policy": ("fcfs", "fcfs", "lottery"),
    "--length-lanes": ("32K,1M", (32 << 10, 1 << 20), "1M,32K"),
    "--target-itl-ms": ("50", 50.0, "-1"),
    "--forgiven-tokens-per-s": ("100", 100.0, "0"),
    "--prefix-caching": ("off", "off", "maybe"),
    "--host": ("::1", "::1", ""),
    "--port": ("9001", 9001, "65536"),
    "--uds": ("/run/t.sock", "/run/t.sock", "/" + "x" * 107),
    "--shutdown-timeout": ("5", 5.0, "inf"),
    "--timeout-keep-alive": ("7.5", 7.5, "soon"),
    "--sse-keep-alive-interval": ("0", 0.0, "nan"),
    "--max-logprobs": ("5", 5, "x"),
    "--max-choices": ("4", 4, "0"),
    "--max-body-bytes": ("1M", 1024**2, "12"),
    "--health-timeout": ("2", 2.0, "0"),
    "--log-level": ("debug", "debug", "loud"),
    "--device": ("cpu", "cpu", "tpu"),
    "--kernels": ("torch", "torch", "cuda"),
    "--c-compiler": ("ccache gcc", "ccache gcc", ""),
    "--threads": ("256", 256, "257"),
}


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of the tree under its dotted name."""
    leaves = {}
    for known in dataclasses.fields(config):
        value, name = getattr(config, known.name), f"{path}{known.name}"
        leaves |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return leaves


def changed(config: ServeConfig) -> dict[str, Any]:
    before = flat(ServeConfig())
    return {name: value for name, value in flat(config).items() if value != before[name]}


def path_of(flag: Any) -> str:
    return f"{flag.branch}.{flag.field}".lstrip(".")


def test_every_flag_has_a_case_and_every_field_a_flag() -> None:
    assert {flag.names[0] for flag in FLAGS} == set(CASES)
    assert {path_of(flag) for flag in FLAGS} == set(flat(ServeConfig()))
    assert len({name for flag in FLAGS for name in flag.names}) == sum(len(flag.names) for flag in FLAGS)


@pytest.mark.parametrize(("flag", "spelling"), [(flag, name) for flag in FLAGS for name in flag.names])
def test_a_flag_changes_exactly_its_field(flag: Any, spelling: str) -> None:
    text, value, _ = CASES[flag.names[0]]
    expected = {path_of(flag): value}
    underscored = "--" + spelling[2:].replace("-", "_")
    assert changed(read_config([spelling, text], {})) == expected
    assert changed(read_config([f"{spelling}={text}"], {})) == expected
    assert changed(read_config([f"{underscored}={text}"], {})) == expected


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.env)
def test_a_variable_changes_exactly_its_field_and_the_command_line_wins(flag: Any) -> None:
    text, value, _ = CASES[flag.names[0]]
    default = flat(ServeConfig())[path_of(flag)]
    assert flag.env == "TWINPANE_" + flag.names[0][2:].upper().replace("-", "_")
    assert changed(read_config([], {flag.env: f" {text} "})) == {path_of(flag): value}
    assert changed(read_config([], {flag.env: ""})) == {}
    if default not in (None, ()):
        assert changed(read_config([flag.names[0], as_text(default)], {flag.env: text})) == {}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if CASES[flag.names[0]][2] is not None], ids=lambda f: f.env)
def test_a_wrong_value_is_refused_under_the_name_it_came_by(flag: Any) -> None:
    wrong = CASES[flag.names[0]][2]
    with pytest.raises(StartupError, match=f"^{flag.names[-1]}: "):
        read_config([f"{flag.names[-1]}={wrong}"], {})
    if wrong:
        with pytest.raises(StartupError, match=f"^{flag.env}: "):
            read_config([], {flag.env: wrong})


def test_a_branch_built_by_hand_is_checked_too() -> None:
    with pytest.raises(StartupError, match=r"^--max-num-seqs: 0 is not between 1 and 65536$"):
        SchedulerConfig(max_sequences=0)
    with pytest.raises(StartupError, match=r"^--dtype: 'int4' is not one of"):
        ModelConfig(dtype="int4")


def test_more_threads_than_the_kernels_pool_holds_are_refused() -> None:
    header = Path(__file__).parents[2] / "kernels" / "native" / "csrc" / "pool.h"
    (most,) = re.findall(r"^#define MAX_THREADS (\d+)$", header.read_text(encoding="utf-8"), re.MULTILINE)
    assert int(most) == MOST_THREADS
    with pytest.raises(StartupError, match=r"^--threads: 1000 is not between 1 and 256$"):
        read_config(["--threads", "1000"], {})
    with pytest.raises(StartupError, match=r"^--threads: 0 is not between"):
        read_config(["--threads", "0"], {})
    with pytest.raises(StartupError, match=r"^--threads: 257 is not between"):
        ServeConfig(threads=257)
    assert read_config(["--threads", "auto"], {}).threads is None


def test_the_model_is_the_first_argument_or_a_flag() -> None:
    assert read_config(["m"], {}).model.model == "m"
    assert read_config(["--port", "9", "m"], {}).model.model == "m"
    assert read_config(["m", "--model", "m"], {"TWINPANE_MODEL": "other"}).model.model == "m"
    with pytest.raises(StartupError, match=r"^one model only, not a and b$"):
        read_config(["a", "--model", "b"], {})


def test_several_served_names() -> None:
    assert read_config(["--served-model-name", "a", "b", "--port", "9"], {}).model.served_model_names == ("a", "b")
    assert read_config([], {"TWINPANE_SERVED_MODEL_NAME": "a, b c"}).model.served_model_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 1_048_576), ("25.6k", 25_600), ("2KiB", 2048)],
)
def test_sizes_take_letters(text: str, tokens: int) -> None:
    assert read_config(["--max-model-len", text], {}).model.max_model_tokens == tokens


@pytest.mark.parametrize("text", ["auto", "-1", "AUTO"])
def test_the_models_own_length(text: str) -> None:
    assert read_config(["--max-model-len", text], {"TWINPANE_MAX_MODEL_LEN": "5"}).model.max_model_tokens is None


@pytest.mark.parametrize("text", ["-2", "0", "1.5", "k", "", "1e3", "1kk"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"^--max-model-len: "):
        read_config([f"--max-model-len={text}"], {})


def test_mistakes_get_a_suggestion() -> None:
    with pytest.raises(StartupError, match=r"^unknown flag --max-model-length; did you mean --max-model-len\?"):
        read_config(["--max-model-length", "5"], {})
    with pytest.raises(StartupError, match=r"^unknown flag -p "):
        read_config(["-p", "5"], {})
    with pytest.raises(StartupError, match=r"^TWINPANE_PROT: no such setting; did you mean TWINPANE_PORT\?$"):
        read_config([], {"TWINPANE_PROT": "5"})
    with pytest.raises(StartupError, match="did you mean bfloat16"):
        read_config(["--dtype", "bfloat"], {})


@pytest.mark.parametrize("argv", [["--port"], ["--port", "--host", "x"], ["--served-model-name"]])
def test_a_flag_without_its_value_is_named(argv: list[str]) -> None:
    with pytest.raises(StartupError, match=f"^{argv[0]} needs a value"):
        read_config(argv, {})


def test_what_kubernetes_sets_for_a_service_called_twinpane() -> None:
    links = {
        "TWINPANE_SERVICE_HOST": "10.0.0.1",
        "TWINPANE_SERVICE_PORT": "8000",
        "TWINPANE_SERVICE_PORT_HTTP": "8000",
        "TWINPANE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TWINPANE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TWINPANE_CANARY_PORT": "tcp://10.0.0.2:8000",
    }
    assert changed(read_config([], links)) == {}
    with pytest.raises(StartupError, match=r"^TWINPANE_PORT: .* enableServiceLinks: false"):
        read_config([], {"TWINPANE_PORT": "tcp://10.0.0.1:8000"})


def test_the_cache_folder_follows_xdg_unless_told() -> None:
    assert read_config([], {"XDG_CACHE_HOME": "/x"}).model.cache_folder == "/x/twinpane"
    assert read_config(["--cache-dir", "/y"], {"XDG_CACHE_HOME": "/x"}).model.cache_folder == "/y"


def test_the_compiler_is_the_one_that_cc_names_unless_told() -> None:
    assert read_config([], {}).c_compiler is None
    assert read_config([], {"CC": " "}).c_compiler is None
    assert read_config([], {"CC": "ccache clang"}).c_compiler == "ccache clang"
    assert read_config([], {"CC": "clang", "TWINPANE_C_COMPILER": "gcc-13"}).c_compiler == "gcc-13"
    assert read_config(["--c-compiler", "tcc"], {"CC": "clang"}).c_compiler == "tcc"


def test_variables_of_others_that_are_read_are_named_in_help() -> None:
    text = help_text()
    for name in ("CC", "XDG_CACHE_HOME", "OMP_WAIT_POLICY", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"):
        assert re.search(rf"\b{name}\b", text), name


def test_help_names_every_flag_every_default_and_stays_narrow() -> None:
    text = help_text()
    assert all(name in text for flag in FLAGS for name in flag.names)
    assert all(flag.help.split()[0] in text for flag in FLAGS)
    assert "[8000]" in text
    assert "[127.0.0.1]" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_branches_of_the_tree_are_the_ones_flags_know() -> None:
    assert {known.name for known in dataclasses.fields(ServeConfig)} >= {name for name in BRANCHES if name}


@pytest.mark.parametrize(
    ("switch", "caching"),
    [
        ("--enable-prefix-caching", "on"),
        ("--no-enable-prefix-caching", "off"),
        ("--no_enable_prefix_caching", "off"),
        ("--disable-radix-cache", "off"),
    ],
)
def test_switches_of_other_servers_mean_the_same_here(switch: str, caching: str) -> None:
    other = {"on": "off", "off": "on"}[caching]
    config = read_config(["--prefix-caching", other, switch, "some/model"], {})
    assert (config.scheduler.prefix_caching, config.model.model) == (caching, "some/model")
    with pytest.raises(StartupError, match="takes no value"):
        read_config([f"{switch}=true"], {})
