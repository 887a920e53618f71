from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import StartupError
from server.simulator.trace import Trace, read_trace

HEADER = "# block_size=4 source=test\nt_s,session,kind,src,lcp,n,input,output,api_s,think_s,stop\n"
FIRST = "0.000,a,main,-1,0,3,13,60,-1,-1,\n"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path, *rows: str) -> Trace:
    return read_trace(write(path / "trace.csv", HEADER + "".join(rows)))


@st.composite
def links(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(src, lcp, n) of some requests."""
    made: list[tuple[int, int, int]] = []
    for index in range(draw(st.integers(0, 12))):
        source = draw(st.integers(-1, index - 1))
        shared = draw(st.integers(0, made[source][2])) if source >= 0 else 0
        made.append((source, shared, shared + draw(st.integers(0, 4))))
    return made


@given(links=links(), limit=st.none() | st.integers(0, 12))
def test_a_path_is_its_sources_first_blocks_and_then_blocks_never_seen_before(
    links: list[tuple[int, int, int]], limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [f"{i},s,main,{src},{lcp},{n},{4 * n + 1},5,-1,-1,\n" for i, (src, lcp, n) in enumerate(links)]
    trace = read_trace(write(tmp_path_factory.mktemp("links") / "trace.csv", HEADER + "".join(rows)), limit)
    paths: list[list[int]] = []
    fresh = 0
    for source, shared, length in links[:limit]:
        paths.append((paths[source][:shared] if shared else []) + list(range(fresh, fresh + length - shared)))
        fresh += length - shared
    assert [request.blocks.tolist() for request in trace.requests] == paths
    assert [request.path_blocks for request in trace.requests] == [len(path) for path in paths]
    assert trace.block_count == fresh
    for request in trace.requests:
        request.lineage.check()
        assert (request.source, request.shared_blocks) == links[request.index][:2]


def test_a_path_can_be_asked_for_twice_and_one_answer_does_not_change_the_other(tmp_path: Path) -> None:
    (request,) = read(tmp_path, FIRST).requests
    request.blocks[:] = -1
    assert request.blocks.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_every_field_is_read_from_plain_and_from_compressed_files(name: str, tmp_path: Path) -> None:
    second = "1.5,b,Explore,0,2,2,11,120,8.59,640.0,tool_use\n"
    trace = read_trace(write(tmp_path / name, HEADER + FIRST + second))
    assert trace.block_tokens == 4
    first, request = trace.requests
    assert (request.index, request.arrival_s, request.session, request.kind) == (1, 1.5, "b", "Explore")
    assert (request.source, request.shared_blocks, request.input_tokens, request.output_tokens) == (0, 2, 11, 120)
    assert (request.held_s, request.think_s, request.stop) == (8.59, 640.0, "tool_use")
    assert (first.source, first.think_s, first.stop) == (-1, None, None)


@pytest.mark.parametrize("unknown", ["-1", "-1.0", ""])
def test_a_run_time_that_is_not_known_is_one_second_and_sixty_tokens_a_second(unknown: str, tmp_path: Path) -> None:
    (request,) = read(tmp_path, f"0,a,main,-1,0,3,13,90,{unknown},{unknown},\n").requests
    assert request.held_s == 2.5
    assert request.think_s is None


def test_a_trace_without_stop_reasons_has_none(tmp_path: Path) -> None:
    text = HEADER.replace(",stop", "") + "0,a,main,-1,0,3,13,60,2,0.0\n"
    (request,) = read_trace(write(tmp_path / "trace.csv", text)).requests
    assert (request.stop, request.held_s, request.think_s) == (None, 2.0, 0.0)


def test_lines_beyond_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", HEADER + FIRST + "rubbish\n")
    assert len(read_trace(path, limit=1).requests) == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("rubbish\n", "1 fields, but 11 columns"),
        ("\n", "1 fields, but 11 columns"),
        ("0,a,main,-1,0,3,13,60,-1,-1\n", "10 fields, but 11 columns"),
        ("0,a,main,-1,0,3,13,60,-1,-1,,\n", "12 fields, but 11 columns"),
        ("soon,a,main,-1,0,3,13,60,-1,-1,\n", "t_s 'soon' is not a number"),
        (",a,main,-1,0,3,13,60,-1,-1,\n", "t_s is missing"),
        ("nan,a,main,-1,0,3,13,60,-1,-1,\n", "t_s 'nan' is not a time"),
        ("0,a,main,-1,0,3,13,60,inf,-1,\n", "api_s 'inf' is not a time"),
        ("0,a,main,-1,0,3,13,60,-1,-2,\n", "think_s '-2' is not a time"),
        ("0,a,main,x,0,3,13,60,-1,-1,\n", "src 'x' is not a whole number"),
        ("0,a,main,-2,0,3,13,60,-1,-1,\n", "src -2 is not between -1 and 100,000,000"),
        ("0,a,main,1,0,3,13,60,-1,-1,\n", "src 1 is not an earlier request"),
        ("0,a,main,-1,1,3,13,60,-1,-1,\n", "lcp 1 is more blocks than the prompt of src -1"),
        ("0,a,main,0,4,5,22,60,-1,-1,\n", "lcp 4 is more blocks than the prompt of src 0"),
        ("0,a,main,0,3,2,13,60,-1,-1,\n", "lcp 3 is more blocks than n 2"),
        ("0,a,main,0,-1,2,13,60,-1,-1,\n", "lcp -1 is not between 0"),
        ("0,a,main,-1,0,3,11,60,-1,-1,\n", "n 3 blocks of 4 tokens are more than input 11"),
        ("0,a,main,-1,0,3,1.5,60,-1,-1,\n", "input '1.5' is not a whole number"),
        ("0,a,main,-1,0,3,13,-5,-1,-1,\n", "output -5 is not between 0"),
        ("0,a,main,-1,0,3,13,100000001,-1,-1,\n", "output 100000001 is not between 0"),
        (f"0,a,main,-1,0,{'9' * 5000},13,5,-1,-1,\n", "is not a whole number"),
    ],
)
def test_a_malformed_row_is_refused_with_its_file_line_and_fault(row: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        read(tmp_path, FIRST, row)
    assert str(tmp_path / "trace.csv") in str(caught.value)
    assert "line 4" in str(caught.value)
    assert says in str(caught.value)


def test_a_row_that_arrives_before_the_one_above_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"line 4: t_s 1\.0 is before"):
        read(tmp_path, FIRST.replace("0.000", "2.0"), FIRST.replace("0.000", "1.0"))


@pytest.mark.parametrize("first", ["", "t_s,session\n", "# block_size=0 x\n", "# block_size=x\n", "# block_size=4.5\n"])
def test_a_first_line_without_a_block_size_is_refused(first: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", first + HEADER.splitlines()[1] + "\n")
    with pytest.raises(StartupError, match=r"trace\.csv, line 1: expected '# block_size=N'"):
        read_trace(path)


@pytest.mark.parametrize("second", ["", FIRST, "session,t_s,kind,src,lcp,n,input,output,api_s,think_s\n"])
def test_other_columns_than_those_of_the_format_are_refused(second: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "# block_size=4\n" + second)
    with pytest.raises(StartupError, match=r"trace\.csv, line 2: expected the column names"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_a_startup_error(tmp_path: Path) -> None:
    whole = gzip.compress((HEADER + FIRST).encode())
    for name, content in {
        "cut.csv.gz": whole[: len(whole) // 2],
        "plain.csv.gz": HEADER.encode(),
        "latin.csv": HEADER.encode() + b"\xff\n",
        "damaged.csv.gz": whole[:12] + b"\xff" * 20 + whole[32:],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StartupError, match=rf"{name}, line \d"):
            read_trace(tmp_path / name)
    with pytest.raises(StartupError, match=r"absent\.csv"):
        read_trace(tmp_path / "absent.csv")
