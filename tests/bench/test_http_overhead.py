from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from bench.http_overhead import Bare, Over, Stream, ask_all, median_ratio, steady_tokens_per_s
from bench.load import Answer, RequestFailed
from bench.peers import Running
from server.api.serve import new_event_loop


def answer(*stamps_s: float, tokens: int | None = None) -> Answer:
    return Answer(
        sent_s=0.0,
        stamps_s=stamps_s,
        ended_s=stamps_s[-1],
        output_tokens=len(stamps_s) if tokens is None else tokens,
        prompt_tokens=None,
    )


def test_only_the_time_in_which_all_streams_decode_is_counted() -> None:
    early = answer(*[float(at) for at in range(11)])
    late = answer(*[float(at) for at in range(6, 21)])
    # From 6, the late one's first token, to 10, the early one's last: four tokens of each.
    assert steady_tokens_per_s([early, late]) == pytest.approx(8 / 4)


def test_chunks_count_with_the_tokens_that_they_hold() -> None:
    in_pairs = answer(*[float(at) for at in range(11)], tokens=22)
    assert steady_tokens_per_s([in_pairs]) == pytest.approx(2.0)


def test_streams_that_never_run_together_give_no_rate() -> None:
    with pytest.raises(SystemExit, match="no phase"):
        steady_tokens_per_s([answer(0.0, 1.0), answer(2.0, 3.0)])


def http_chunk(*events: bytes) -> bytes:
    data = b"".join(b"data: %b\n\n" % event for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


def text_event(text: str) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "text": text}], "usage": None})


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = http_chunk(orjson.dumps({"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 7}}), b"[DONE]")
LAST = b"0\r\n\r\n"


async def received(*pieces: bytes) -> Stream:
    stream = Stream(b"")
    for number, piece in enumerate(pieces):
        stream.data_received(piece)
        stream._stamps_s[number] = float(number)
    return stream


async def test_a_chunk_counts_from_the_arrival_of_its_last_byte() -> None:
    whole, cut = http_chunk(text_event("a\n\nb")), http_chunk(text_event("c"))
    pieces = (HEAD, whole + cut[:9], cut[9:], http_chunk(text_event(""), text_event("d"), text_event("e")), END, LAST)
    answer = (await received(*pieces)).answer()
    assert answer.stamps_s == (1.0, 2.0, 3.0, 3.0)
    assert (answer.output_tokens, answer.prompt_tokens, answer.ended_s) == (4, 7, 5.0)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), "503"),
        ((HEAD, http_chunk(text_event("a"))), "broke off"),
        ((HEAD, http_chunk(orjson.dumps({"error": {"message": "gone"}})), LAST), "gone"),
        ((HEAD, http_chunk(text_event("a")), LAST), "usage"),
    ],
)
async def test_a_stream_that_fails_is_no_measurement(pieces: tuple[bytes, ...], said: str) -> None:
    with pytest.raises(RequestFailed, match=said):
        (await received(*pieces)).answer()


def test_all_streams_are_asked_over_sockets_of_their_own() -> None:
    bodies = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        bodies.append(orjson.loads(await reader.readexactly(int(head.partition(b"content-length: ")[2]))))
        for piece in (HEAD, http_chunk(text_event("a")), END, LAST):
            writer.write(piece)
            await asyncio.sleep(0.01)
        writer.close()

    async def ask() -> list[Answer]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        running = Running(
            url=f"http://{host}:{port}/v1", model_name="m", pid=0, started_s=0.0, ready_s=0.0, log=Path("unused")
        )
        async with server:
            return await asyncio.wait_for(ask_all(running, ["x", "y"], 4), 10)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        answers = runner.run(ask())
    assert [len(each.stamps_s) for each in answers] == [1, 1]
    assert sorted(body["prompt"] for body in bodies) == ["x", "y"]
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 4 for body in bodies)


def over(tokens_per_s: float, other_cores: float = 0.0) -> Over:
    return Over(tokens_per_s=tokens_per_s, loop_s_per_token=0.0, other_cores=other_cores)


def test_each_rate_over_http_is_held_against_the_runs_around_it() -> None:
    alone = [Bare(runner=rate, stepped=0.0) for rate in (100.0, 200.0, 100.0, 50.0)]
    assert median_ratio(alone, [over(150.0), over(75.0), over(60.0)]) == pytest.approx(0.8)


def test_disturbed_rounds_do_not_count_beside_clean_ones() -> None:
    alone = [Bare(runner=100.0, stepped=0.0)] * 4
    assert median_ratio(alone, [over(90.0), over(10.0, 1.0), over(98.0)]) == pytest.approx(0.94)
    assert median_ratio(alone[:3], [over(90.0, 1.0), over(10.0, 1.0)]) == pytest.approx(0.5)
