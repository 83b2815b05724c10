"""A command at many places: what comes of those that answer, of those that do not, and of a stop in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from raycontrol import process
from raycontrol.execution import Began, Command, News, Over, Wrote
from tests.exec_places import LocalWay, execution
from tests.support import wait_until

NAMES = ("host-a", "host-b", "host-c")


@pytest.fixture
def way(tmp_path: Path) -> LocalWay:
    return LocalWay(tmp_path)


def output(news: Iterable[News], name: str) -> bytes:
    return b"".join(item.data for item in news if isinstance(item, Wrote) and item.place == name)


def ends(news: Iterable[News]) -> dict[str, Over]:
    return {item.place: item for item in news if isinstance(item, Over)}


def test_it_runs_everywhere_at_once_and_each_place_is_over_once(way: LocalWay) -> None:
    with execution(way, NAMES, Command("echo $NODE; [[ $NODE != host-b ]]")) as running:
        news = list(running)
    assert [output(news, name) for name in NAMES] == [b"host-a\n", b"host-b\n", b"host-c\n"]
    assert {name: over.status for name, over in ends(news).items()} == {"host-a": 0, "host-b": 1, "host-c": 0}
    assert sorted(item.place for item in news if isinstance(item, Began)) == [*NAMES]
    assert sum(isinstance(item, Over) for item in news) == 3


def test_a_place_that_does_not_answer_is_named_and_holds_nobody_up(tmp_path: Path) -> None:
    way = LocalWay(tmp_path, silent=["host-b"], broken=["host-c"])
    began = time.monotonic()
    with execution(way, NAMES, Command("echo $NODE", timeout_s=0.1), answer_s=0.5) as running:
        first = next(item for item in running if isinstance(item, Over) and item.place == "host-a")
        assert first.status == 0
        rest = ends(running)
    assert rest["host-b"].why == "it has not answered for 6 s; what it runs ends by itself"
    assert time.monotonic() - began < 15
    assert rest["host-b"].status == 125


def test_a_place_without_an_actor_says_so(tmp_path: Path) -> None:
    with execution(LocalWay(tmp_path, broken=["host-c"]), NAMES, Command("echo $NODE")) as running:
        found = ends(running)
    assert found["host-c"] == Over("host-c", 125, why="this node has no raycontrol actor (yet)")
    assert found["host-a"].status == found["host-b"].status == 0


def test_one_at_a_time_where_no_more_may(way: LocalWay) -> None:
    command = Command("mkdir /tmp/$RAYCONTROL_ATTEMPT_ID && sleep 0.1 && rmdir /tmp/$RAYCONTROL_ATTEMPT_ID")
    with execution(way, NAMES, command, parallel=1) as running:
        assert {over.status for over in ends(running).values()} == {0}


def test_a_stop_ends_it_everywhere_and_begins_nothing_more(way: LocalWay, tmp_path: Path) -> None:
    with execution(way, NAMES, Command("echo began; sleep 1000"), parallel=2) as running:
        news = []
        for item in running:
            news.append(item)
            if [type(item) for item in news].count(Wrote) == 2:
                running.stop()
    assert sorted(over.why or "" for over in ends(news).values()) == [
        "it was interrupted",
        "it was interrupted",
        "it was not begun",
    ]
    assert {over.status for over in ends(news).values()} == {130}
    wait_until(lambda: not process.marked(f"test-{tmp_path.name}", supervisors=True), what="all is gone")


def test_a_stop_that_is_there_before_the_command_ends_it_all_the_same(tmp_path: Path) -> None:
    way = LocalWay(tmp_path, late=["host-b"])
    with execution(way, NAMES[:2], Command("echo began; sleep 1000")) as running:
        news = []
        for item in running:
            news.append(item)
            if isinstance(item, Wrote) and item.place == "host-a":
                running.stop()
    assert {over.why for over in ends(news).values()} == {"it was interrupted"}
    assert [item.place for item in news if isinstance(item, Began)] == ["host-a", "host-b"]


def test_who_leaves_in_the_middle_has_it_ended(way: LocalWay, tmp_path: Path) -> None:
    with execution(way, NAMES, Command("echo began; sleep 1000")) as running:
        next(item for item in running if isinstance(item, Wrote))
    wait_until(lambda: not process.marked(f"test-{tmp_path.name}", supervisors=True), what="all is gone")


def test_two_hundred_places_at_once(way: LocalWay) -> None:
    names = [f"n{number}" for number in range(200)]
    with execution(way, names, Command("echo $NODE"), answer_s=60) as running:
        news = list(running)
    assert {over.status for over in ends(news).values()} == {0}
    assert all(output(news, name) == f"{name}\n".encode() for name in names)
