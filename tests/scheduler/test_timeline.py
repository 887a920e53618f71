from __future__ import annotations

from server.request import RequestId
from server.scheduler.timeline import MOST_EVENTS, MOST_REQUESTS, Timelines
from tests.scheduler.test_scheduler import FakeHouse, layout


def test_the_story_of_a_request_is_told_from_queue_to_end() -> None:
    house = FakeHouse(layout(slabs=60), prefix_caching=True, prefill_chunk_tokens=8)
    house.submit("first", tuple(range(20)), outputs=2)
    house.run()
    house.submit("a#7", tuple(range(28)), outputs=3)
    house.run()
    (events,) = house.scheduler.timelines.of("a").values()
    assert [each.what for each in events] == ["queued", "matched", "computed", "computed", "first_token", "ended"]
    assert events[0].facts == {"choice": 0, "tokens": 28, "lane": 0}
    assert events[1].facts["cached_tokens"] == 16
    assert [(each.facts["start"], each.facts["tokens"]) for each in events[2:4]] == [(16, 8), (24, 4)]
    assert events[-1].facts == {"outcome": "length", "output_tokens": 3}
    assert [each.at_s for each in events] == sorted(each.at_s for each in events)


def test_a_preemption_and_what_is_computed_again_are_in_the_story() -> None:
    house = FakeHouse(layout(slabs=9, window_tokens=16), prefill_chunk_tokens=8, step_token_budget=32)
    for number in range(8):
        house.submit(f"{number}", tuple(range(number, 4 * number + 6)), outputs=50 + 5 * number, seed=number)
    house.run()
    stories = [
        [each.what for each in events]
        for number in range(8)
        for events in house.scheduler.timelines.of(f"{number}").values()
    ]
    assert house.preemptions > 0
    assert house.preemptions == sum(story.count("preempted") for story in stories)
    assert all(story.count("queued") == 1 + story.count("preempted") for story in stories)
    for number in range(8):
        (events,) = house.scheduler.timelines.of(f"{number}").values()
        last = max(at for at, each in enumerate(events) if each.what == "queued")
        computed = [int(each.facts["tokens"]) for each in events[last:] if each.what == "computed"]
        assert sum(computed) == events[last].facts["tokens"], "answers that are computed again are in it, too"


def test_only_the_last_requests_are_remembered_and_of_each_the_first_events_and_the_last() -> None:
    timelines = Timelines()
    for number in range(MOST_REQUESTS + 10):
        timelines.begin(RequestId(f"{number}"))
    assert not timelines.of("9") and timelines.of("10")
    for number in range(5_000):
        timelines.note(RequestId("10"), float(number), "computed", start=number)
    timelines.note(RequestId("10"), 5_000.0, "ended")
    (events,) = timelines.of("10").values()
    assert len(events) == 2 * MOST_EVENTS + 1
    assert events[0].facts["start"] == 0 and events[-1].what == "ended" and events[-2].facts["start"] == 4_999
    left_out = [each for each in events if each.what == "left_out"]
    assert sum(int(each.facts["events"]) for each in left_out) + len(events) - len(left_out) == 5_001
