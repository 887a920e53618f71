"""Scores a server of twinpane-tiny on held-out prompts: needles, copying, tools, counting and more, by exact match.

    python bench/tiny_tasks.py                                        all tasks, the server on port 8000
    python bench/tiny_tasks.py --base-url http://host:9000/v1 --model tiny --limit 20
    python bench/tiny_tasks.py --tasks tool_call,tool_result --raw    only these, as rendered prompts
    python bench/tiny_tasks.py --distance 20 --plot distance.png      needles, 20 in every range of distances
    python bench/tiny_tasks.py --require needle=0.9,copy=0.9          exit code 1 if a score is lower
    python bench/tiny_tasks.py --network models/twinpane-tiny         no server: the network as it was trained

Any OpenAI-compatible server will do. Every prompt is greedy. A prompt goes to /v1/chat/completions as messages and
tools; if the server refuses the tools, those with tools go to /v1/completions as text, rendered by the template that
is shipped with the model. The model is given the same tokens either way, and the table shows whether it was: "same
prompt" counts the prompts for which the server's own count of tokens is the fixture's. Scores compare where it is all
of them, whatever the way ("via").

--network measures what a server should reach: every token by a forward of the trainer's network over the whole text,
with no cache, no batch and none of the server's code between the tokenizer and the sampled token.

When an answer is right (tools/train_tiny/tasks_score.py): thoughts up to </think> do not count; calls are taken from
`tool_calls`, or from <tool_call> in the text where there are none; content and calls (names, order, arguments with
their types) must be the expected ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
from tqdm import tqdm

from tools.train_tiny.tasks import TASKS
from tools.train_tiny.tasks_prompts import FIXTURE, Prompt, load, needle_at
from tools.train_tiny.tasks_score import Answer, is_right, read_message, read_text

REQUEST_LIMIT_S = 600.0
RANGES = (1, 16, 32, 64, 128, 256, 512, 768, 1_024, 1_280, 1_536, 1_792, 2_001)
"""Edges of the ranges of distances: [1, 16), [16, 32), ..."""


class CouldNotScore(Exception):
    """The server cannot be reached, or refuses what it should answer."""


class ToolsRefused(Exception):
    """The server takes no tools; the prompt can be sent as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """same_prompt: whether the server counted the prompt's tokens as we do; None if it told no count."""

    prompt: Prompt
    text: str
    right: bool
    via: str
    same_prompt: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line. raw: always, never, or (None) where tools are refused."""

    base_url: str
    model: str | None
    raw: bool | None
    concurrency: int
    max_tokens: int
    headers: dict[str, str]


class Suite:
    """One server. Owner of what was learned about it: its model's name, and whether it takes tools."""

    def __init__(self, session: aiohttp.ClientSession, wanted: Wanted) -> None:
        self._session = session
        self._wanted = wanted
        self._model = wanted.model
        self._takes_tools: bool | None = None
        self._turn = asyncio.Semaphore(wanted.concurrency)

    async def score(self, prompts: Sequence[Prompt], *, describe: str) -> list[Scored]:
        """All of them, in their order. Raises CouldNotScore."""
        self._model = self._model or await self._first_model()
        with tqdm(total=len(prompts), desc=describe, unit="prompt") as bar:

            async def one(prompt: Prompt) -> Scored:
                async with self._turn:
                    scored = await self._one(prompt)
                bar.update()
                return scored

            try:
                async with asyncio.TaskGroup() as group:
                    running = [group.create_task(one(prompt)) for prompt in prompts]
            except* CouldNotScore as failed:
                raise failed.exceptions[0] from None
        return [task.result() for task in running]

    async def _one(self, prompt: Prompt) -> Scored:
        refused = self._takes_tools is False and bool(prompt.tools)
        if self._wanted.raw or (self._wanted.raw is None and refused):
            return await self._as_text(prompt)
        try:
            return await self._as_chat(prompt)
        except ToolsRefused as refusal:
            if self._wanted.raw is False:
                raise CouldNotScore(f"The server refuses tools: {refusal}") from None
            self._takes_tools = False
            return await self._as_text(prompt)

    async def _as_chat(self, prompt: Prompt) -> Scored:
        body: dict[str, Any] = {
            "messages": prompt.messages,
            "chat_template_kwargs": {"enable_thinking": prompt.thinking},
        }
        if prompt.tools:
            body["tools"] = prompt.tools
        answer = await self._post("chat/completions", body, with_tools=bool(prompt.tools))
        message = answer["choices"][0]["message"]
        text = str(message.get("content") or "") + (
            json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        )
        return _scored(prompt, text, read_message(message, prompt.tools), "chat", answer)

    async def _as_text(self, prompt: Prompt) -> Scored:
        answer = await self._post("completions", {"prompt": prompt.text}, with_tools=False)
        text = str(answer["choices"][0]["text"])
        return _scored(prompt, text, read_text(text, prompt.tools), "raw", answer)

    async def _post(self, path: str, body: Mapping[str, Any], *, with_tools: bool) -> dict[str, Any]:
        whole = {"model": self._model, "temperature": 0, "max_tokens": self._wanted.max_tokens, **body}
        try:
            async with self._session.post(f"{self._wanted.base_url}/{path}", json=whole) as response:
                text = await response.text()
                if response.status == 200:
                    answer = json.loads(text)
                    assert isinstance(answer, dict)
                    return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise CouldNotScore(f"{self._wanted.base_url}/{path}: {type(error).__name__}: {error}") from error
        if with_tools and response.status in (400, 404, 422, 501) and "tool" in text.lower():
            raise ToolsRefused(text[:200])
        raise CouldNotScore(f"{self._wanted.base_url}/{path}: HTTP {response.status}: {text[:300]}")

    async def _first_model(self) -> str:
        try:
            async with self._session.get(f"{self._wanted.base_url}/models") as response:
                return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError) as error:
            raise CouldNotScore(f"{self._wanted.base_url}/models: {type(error).__name__}: {error}") from error


def _scored(prompt: Prompt, text: str, answer: Answer, via: str, body: Mapping[str, Any]) -> Scored:
    counted = (body.get("usage") or {}).get("prompt_tokens")
    return Scored(
        prompt=prompt,
        text=text,
        right=is_right(answer, prompt.expected),
        via=via,
        same_prompt=None if counted is None else counted == prompt.tokens,
    )


def score_network(folder: Path, prompts: Sequence[Prompt], *, max_tokens: int, describe: str) -> list[Scored]:
    """All of them by the trainer's own loop. Raises CouldNotScore if the folder holds no such model."""
    from server.errors import StartupError
    from server.text.tokenizer import Tokenizer
    from tools.train_tiny.evaluate import greedy
    from tools.train_tiny.export import load_network

    try:
        network, tokenizer = load_network(folder), Tokenizer.from_hf_folder(folder)
    except (OSError, StartupError) as error:
        raise CouldNotScore(f"{folder} is no folder of a trained network: {error}") from error
    scored = []
    for prompt in tqdm(prompts, desc=describe, unit="prompt"):
        ids = tokenizer.encode(prompt.text, parse_special=True, add_bos=False)
        # A guess spares forwards where it is right, and changes nothing.
        guess = tokenizer.encode(prompt.expected_text, parse_special=True, add_bos=False)
        written = greedy(network, ids, limit=max_tokens, stops=tokenizer.stop_token_ids, guess=guess)
        kept = [token for token in written if token not in tokenizer.stop_token_ids]
        text = b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
        body = {"usage": {"prompt_tokens": len(ids)}}
        scored.append(_scored(prompt, text, read_text(text, prompt.tools), "network", body))
    return scored


# --- what is shown ------------------------------------------------------------------------------------------------


def share(scored: Iterable[Scored]) -> float | None:
    """Of the right ones; None of none."""
    rights = [each.right for each in scored]
    return sum(rights) / len(rights) if rights else None


def table(scored: Sequence[Scored]) -> str:
    """One row a task, in Markdown."""
    rows = [("task", "prompts", "exact", "thinking off", "thinking on", "via", "same prompt")]
    for task in (task for task in TASKS if any(each.prompt.task == task for each in scored)):
        mine = [each for each in scored if each.prompt.task == task]
        known = [each.same_prompt for each in mine if each.same_prompt is not None]
        rows.append(
            (
                task,
                str(len(mine)),
                _percent(share(mine)),
                _percent(share(each for each in mine if not each.prompt.thinking)),
                _percent(share(each for each in mine if each.prompt.thinking)),
                "+".join(sorted({each.via for each in mine})),
                f"{sum(known)} of {len(known)}" if known else "not told",
            )
        )
    return _aligned(rows)


def by_distance(scored: Sequence[Scored]) -> list[tuple[int, int, int, int]]:
    """(first distance, last distance, right, prompts) of every range that has prompts."""
    found = []
    for low, high in pairwise(RANGES):
        rights = [each.right for each in scored if low <= (each.prompt.distance or 0) < high]
        if rights:
            found.append((low, high - 1, sum(rights), len(rights)))
    return found


def distance_table(scored: Sequence[Scored]) -> str:
    rows = [("tokens between", "prompts", "exact")]
    rows += [
        (f"{low} to {high}", str(count), _percent(right / count)) for low, high, right, count in by_distance(scored)
    ]
    return _aligned(rows)


def draw(scored: Sequence[Scored], path: Path, *, window: int | None) -> None:
    """Share of right answers by distance, with 95 % intervals; dots are single prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    ranges = by_distance(scored)
    centres = [math.sqrt(low * high) for low, high, _, _ in ranges]
    shares = [right / count for _, _, right, count in ranges]
    intervals = [wilson(right, count) for _, _, right, count in ranges]
    reach = [
        [mean - low for mean, (low, _) in zip(shares, intervals, strict=True)],
        [high - mean for mean, (_, high) in zip(shares, intervals, strict=True)],
    ]
    axes.errorbar(centres, shares, yerr=reach, color="#0b6e4f", marker="o", capsize=3)
    for right, colour, at in ((True, "#6fb98f", 1.04), (False, "#c1440e", -0.04)):
        places = [each.prompt.distance or 0 for each in scored if each.right is right]
        axes.plot(places, [at] * len(places), "|", color=colour)
    if window is not None:
        axes.axvline(window, color="#8d99ae", linestyle="--", label=f"window of {window} keys")
        axes.legend(loc="lower left")
    axes.set_xscale("log")
    axes.set_ylim(-0.1, 1.1)
    axes.set_xlabel("tokens between a fact and the question about it")
    axes.set_ylabel("exact match")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share. Source: Wilson 1927, JASA 22, 209-212."""
    z = 1.96
    mean = right / count
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def as_json(scored: Sequence[Scored], *, distance: bool) -> dict[str, Any]:
    """Everything that the tables are made of, and every answer that was wrong."""
    tasks = dict.fromkeys(each.prompt.task for each in scored)
    found: dict[str, Any] = {
        "scores": {task: share(each for each in scored if each.prompt.task == task) for task in tasks},
        "prompts": [
            {
                "id": each.prompt.id,
                "task": each.prompt.task,
                "thinking": each.prompt.thinking,
                "tokens": each.prompt.tokens,
                "distance": each.prompt.distance,
                "right": each.right,
                "via": each.via,
                "same_prompt": each.same_prompt,
                **({} if each.right else {"expected": _shown(each.prompt.expected), "got": each.text}),
            }
            for each in scored
        ],
    }
    if distance:
        found["distances"] = [
            {"from": low, "to": high, "right": right, "prompts": count}
            for low, high, right, count in by_distance(scored)
        ]
    return found


def too_low(scored: Sequence[Scored], required: Mapping[str, float]) -> list[str]:
    """A line for each task that misses its threshold, or was not scored at all."""
    lines = []
    for task, least in required.items():
        got = share(each for each in scored if each.prompt.task == task)
        if got is None or got < least:
            lines.append(f"{task}: {_percent(got)} exact, {least:.1%} required")
    return lines


def _shown(answer: Answer) -> str:
    calls = "".join(f" {name}({json.dumps(arguments)})" for name, arguments in answer.calls)
    return f"{answer.content}{calls}".strip()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


# --- the command line ---------------------------------------------------------------------------------------------


def chosen(prompts: Sequence[Prompt], tasks: Sequence[str], limit: int | None) -> list[Prompt]:
    """`limit` of each task, spread evenly over it, since needles get longer from the first to the last."""
    kept: list[Prompt] = []
    for task in tasks:
        mine = [prompt for prompt in prompts if prompt.task == task]
        count = len(mine) if limit is None else min(limit, len(mine))
        kept += [mine[(2 * index + 1) * len(mine) // (2 * count)] for index in range(count)]
    return kept


def spread_over_distances(each: int) -> list[Prompt]:
    """Needles made now, always the same: `each` of them in every range, at even steps."""
    return [
        needle_at(low + (2 * index + 1) * (high - low) // (2 * each), seed=index)
        for low, high in pairwise(RANGES)
        for index in range(each)
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="up to /v1 (default %(default)s)")
    add("--network", type=Path, metavar="FOLDER", help="no server: this folder's network, by the trainer's loop")
    add("--model", metavar="NAME", help="as the server calls it; the first of its list if not given")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--tasks", type=_tasks, default=TASKS, metavar="A,B", help=f"some of {', '.join(TASKS)} (default: all)")
    add("--limit", type=_count, metavar="N", help="prompts of each task (default: all)")
    add("--concurrency", type=_count, default=8, metavar="N", help="requests at a time (default %(default)s)")
    add(
        "--max-tokens",
        type=_count,
        default=256,
        metavar="N",
        help="of an answer, thought included (default %(default)s)",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--raw", action="store_const", const=True, help="send all prompts as text to /v1/completions")
    way.add_argument("--chat", dest="raw", action="store_const", const=False, help="never; stop if tools are refused")
    add("--distance", type=_count, metavar="N", help="in place of the tasks: N needles in each range of distances")
    add("--plot", type=Path, metavar="PATH", help="picture of the needles by distance")
    add("--window", type=_count, metavar="KEYS", help="the model's window, to be shown in the picture")
    add("--json", type=Path, metavar="PATH", help="scores, every prompt, and what was wrong")
    add("--require", type=_thresholds, default={}, metavar="TASK=SHARE,...", help="exit code 1 below, as needle=0.9")
    add("--fixture", type=Path, default=FIXTURE, metavar="PATH", help="prompts (default: %(default)s)")
    return parser.parse_args(arguments)


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise argparse.ArgumentTypeError(f"there is no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _thresholds(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, least = part.partition("=")
        _tasks(name)
        try:
            found[name] = float(least)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not TASK=SHARE") from None
        if not 0 <= found[name] <= 1:
            raise argparse.ArgumentTypeError(f"{part!r}: a share is from 0 to 1")
    return found


async def run(options: argparse.Namespace) -> list[Scored]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    wanted = Wanted(
        base_url=options.base_url.rstrip("/"),
        model=options.model,
        raw=options.raw,
        concurrency=options.concurrency,
        max_tokens=options.max_tokens,
        headers=headers,
    )
    if options.distance:
        prompts = spread_over_distances(options.distance)
    else:
        prompts = chosen(load(options.fixture), options.tasks, options.limit)
    describe = "needles" if options.distance else "tasks"
    if options.network:
        return score_network(options.network, prompts, max_tokens=options.max_tokens, describe=describe)
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=wanted.headers) as session:
        return await Suite(session, wanted).score(prompts, describe=describe)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        scored = asyncio.run(run(options))
    except CouldNotScore as error:
        print(error, file=sys.stderr)
        return 2
    distance = bool(options.distance)
    print(table(scored) if not distance else distance_table(scored))
    if options.plot:
        draw([each for each in scored if each.prompt.distance is not None], options.plot, window=options.window)
    if options.json:
        options.json.write_text(json.dumps(as_json(scored, distance=distance), indent=1) + "\n", encoding="utf-8")
    missed = too_low(scored, options.require)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
