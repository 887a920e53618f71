"""The command line: `twinpane serve MODEL`, the same as `python -m server serve MODEL`.

Help, version and mistakes answer without loading torch. Exit codes: 0 clean, 1 the engine failed, 2 something to
change before the server can start.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from types import FrameType

from server import __version__
from server.config import ServeConfig, help_text, read_config
from server.errors import StartupError

USAGE = """\
usage: twinpane COMMAND ...

An OpenAI-compatible inference server for hybrid sliding-window models.

Commands:
  serve MODEL      load a model and answer requests (twinpane serve --help lists its flags)
  simulate TRACE   play a trace of requests through the prefix cache (twinpane simulate --help)

Flags:
  --help         this text
  --version      the version

Try: twinpane serve smollm2-135m
"""

COMMANDS = ("serve", "simulate")
HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None, env: MutableMapping[str, str] = os.environ) -> int:
    """Run one command and return the exit code."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if command in HELP:
            print(USAGE, end="")
            return 0
        if command == "--version":
            print(f"twinpane {__version__}")
            return 0
        if command not in COMMANDS:
            raise StartupError(unknown_command(command))
        if command == "simulate":
            from server.simulator.command import simulate

            return simulate(rest)
        if any(word in HELP[:2] for word in rest):
            print(help_text(), end="")
            return 0
        return run_serve(read_config(rest, env), env)
    except StartupError as error:
        print(f"twinpane: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run_serve(config: ServeConfig, env: MutableMapping[str, str]) -> int:
    """Load everything and serve until told to stop."""
    # OpenMP reads this once, when torch is first imported. Its spinning threads would take the cores that the event
    # loop and the other threads need.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # As process 1 of a container, Python ignores SIGTERM until somebody handles it; loading a model takes minutes.
    signal.signal(signal.SIGTERM, stop_cleanly)
    # What is most often wrong is found in the first second, before torch is even imported.
    from server.api.serve import bind_socket
    from server.model.source import resolve

    model = config.model
    with bind_socket(config.http.host, config.http.port, config.http.uds) as sock:
        source = resolve(
            model.model, cache_folder=model.cache_folder, revision=model.revision, tokenizer=model.tokenizer
        )
        from server.assemble import serve

        return serve(config, sock, source)


def stop_cleanly(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def unknown_command(command: str) -> str:
    if command.startswith("-"):
        return f"{command} is no flag of twinpane itself; did you mean: twinpane serve {command}?"
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"unknown command {command!r}; did you mean: twinpane {close[0] if close else f'serve {command}'}?"


if __name__ == "__main__":
    sys.exit(main())
