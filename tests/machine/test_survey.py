"""What the controller tells of the nodes, with a simulated cluster; and a node's own facts and look-ups."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from raycontrol.errors import RaycontrolError, UsageError
from raycontrol.hardware import Lookup, NodeFacts
from raycontrol.lookups import look_up
from raycontrol.node import Collector, Node, SharedFacts
from raycontrol.status import JobState
from raycontrol.survey import Survey, named
from tests.machine.fake_cluster import FakeCluster, Site, in_loop
from tests.node_facts import cpu_facts, gpu_facts
from tests.support import wait_until
from tests.unit.fake_gangs import Program, nodes

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 10


def survey(cluster: FakeCluster, *, check: bool = False, answer_s: float = 10) -> Survey:
    return Survey(cluster, time.time, check, answer_s)


# The controller.


@in_loop
async def test_nodes_are_told_with_what_is_free_and_whose_jobs_are_there(tmp_path: Path) -> None:
    stays = {"master-0": Program(seconds=None), "worker-0": Program(seconds=None)}
    here = Site(tmp_path, FakeCluster(nodes("a", "b", "c", cpu=4), stays))
    here.cluster.answers["id-of-b"] = gpu_facts(hostname="b")
    await here.submit("digits-1", resources={"cpu": 3})
    await here.reaches("digits-1", JobState.RUNNING)
    a, b, c = await here.controller.nodes()
    assert [(item.name, item.ip, item.head) for item in (a, b, c)] == [
        ("a", "10.0.0.1", True),
        ("b", "10.0.0.2", False),
        ("c", "10.0.0.3", False),
    ]
    assert [(item.free["CPU"], item.total["CPU"], item.jobs) for item in (a, b, c)] == [
        (1, 4, ("digits-1",)),
        (1, 4, ("digits-1",)),
        (4, 4, ()),
    ]
    assert (a.facts, b.facts) == (cpu_facts(), gpu_facts(hostname="b"))
    assert a.silent is None
    await here.controller.stop("digits-1", "the test is over", force=True)
    await here.ends("digits-1")
    assert [item.jobs for item in await here.controller.nodes()] == [(), (), ()]
    await here.kill()


@in_loop
async def test_a_check_adds_clocks_and_look_ups_of_all_peers(tmp_path: Path) -> None:
    here = Site(tmp_path, FakeCluster(nodes("a", "b", "c")))
    here.cluster.clocks_ahead_s["id-of-b"] = 5.0
    (b,) = await here.controller.nodes(["b"], check=True)
    assert b.facts is not None and b.facts.clock_offset_s is not None
    assert 4.5 < b.facts.clock_offset_s < 5.5
    assert b.facts.lookups == (
        Lookup(ip="10.0.0.1", seconds=0.25, name="name of 10.0.0.1"),
        Lookup(ip="10.0.0.3", seconds=0.25, name="name of 10.0.0.3"),
    )
    await here.kill()


@in_loop
async def test_a_name_that_no_node_has_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    here = Site(tmp_path, FakeCluster(nodes("a", "b")))
    with pytest.raises(UsageError, match=r"^no node 'x'; the cluster has a \(10.0.0.1\), b \(10.0.0.2\)$"):
        await here.controller.nodes(["a", "x"])
    await here.kill()


def test_nodes_are_named_by_name_ip_or_the_beginning_of_their_id() -> None:
    rooms = nodes("host-a", "host-b", "id-of")
    assert [room.name for room in named(rooms, ["host-b", "10.0.0.1"])] == ["host-a", "host-b"]
    assert [room.name for room in named(rooms, ["id-of-host-b"])] == ["host-b"]
    with pytest.raises(
        UsageError, match=r"'id-of-host' is the beginning of several nodes' ids: id-of-host-a, id-of-host-b;"
    ):
        named(rooms, ["id-of-host"])
    assert [room.name for room in named(rooms, ["id-of"])] == ["id-of"]
    with pytest.raises(UsageError, match="no node 'id-'"):
        named(rooms, ["id-"])


# Nodes that do not answer.


@in_loop
async def test_a_silent_node_is_named_and_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    cluster = FakeCluster(nodes("a", "b", "c"))
    cluster.answers["id-of-b"] = None
    started = time.monotonic()
    found = await survey(cluster, check=True, answer_s=0.2).nodes(nodes("a", "b", "c"), (), None)
    assert time.monotonic() - started < 5
    assert [(item.name, item.facts is not None, item.silent) for item in found] == [
        ("a", True, None),
        ("b", False, "did not answer within 0.2 s"),
        ("c", True, None),
    ]


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        (RaycontrolError("has no raycontrol node actor"), "has no raycontrol node actor"),
        (OSError("first line\n\n  the cause\n"), "OSError: the cause"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_node_that_fails_says_why_in_a_line(error: Exception, silent: str) -> None:
    cluster = FakeCluster(nodes("a"))
    cluster.answers["id-of-a"] = error
    (found,) = asyncio.run(survey(cluster).nodes(nodes("a"), (), None))
    assert (found.facts, found.silent) == (None, silent)


class MuteCluster(FakeCluster):
    """Gives facts, and answers nothing else."""

    async def look_up(self, node_id: str, ips: object, limit_s: float) -> tuple[Lookup, ...]:
        raise ConnectionError("the actor restarts")

    async def time_of(self, node_id: str) -> float:
        raise ConnectionError("the actor restarts")


def test_facts_are_shown_although_clock_and_look_ups_fail() -> None:
    (found,) = asyncio.run(survey(MuteCluster(nodes("a")), check=True).nodes(nodes("a"), (), None))
    assert found.facts == cpu_facts()
    assert found.silent is None


class SlowWay(FakeCluster):
    """A node whose clock is right, and answers that take ``ways_s`` each."""

    def __init__(self, clock: list[float], ways_s: list[float]) -> None:
        super().__init__(nodes("a"))
        self._clock = clock
        self._ways_s = ways_s

    async def time_of(self, node_id: str) -> float:
        theirs = self._clock[0]
        self._clock[0] += self._ways_s.pop(0)
        return theirs


def test_of_three_readings_of_a_clock_the_quickest_counts() -> None:
    clock = [1000.0]
    cluster = SlowWay(clock, [4.0, 0.5, 2.0])
    (found,) = asyncio.run(Survey(cluster, lambda: clock[0], check=True).nodes(nodes("a"), (), None))
    assert found.facts is not None
    assert found.facts.clock_offset_s == -0.25


def test_resources_by_which_ray_names_a_node_are_left_out() -> None:
    cluster = FakeCluster(nodes("a"))
    (room,) = nodes("a")
    total = {"CPU": 4.0, "node:10.0.0.1": 1.0, "node:__internal_head__": 1.0, "tpu": 2.0}
    rooms = [type(room)(room.id, room.name, room.ip, total, total)]
    (found,) = asyncio.run(survey(cluster).nodes(rooms, (), None))
    assert found.total == found.free == {"CPU": 4.0, "tpu": 2.0}


# A node's own facts.


class Counted:
    """Collects facts that a test holds back, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def __call__(self, anew: bool) -> NodeFacts:
        self.calls += 1
        assert self.may_end.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return cpu_facts(at=float(self.calls))


def test_calls_under_way_at_the_same_time_share_one_collection() -> None:
    collect = Counted()

    async def story() -> None:
        facts = SharedFacts(collect)
        asked = [asyncio.ensure_future(facts.get(anew=False)) for _ in range(3)]
        await asyncio.to_thread(wait_until, lambda: collect.calls == 1)
        asked[0].cancel()
        collect.may_end.set()
        assert [found.at for found in await asyncio.gather(*asked[1:])] == [1.0, 1.0]
        assert (await facts.get(anew=False)).at == 2.0
        assert collect.calls == 2

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


def test_after_a_collection_that_failed_the_next_call_tries_again() -> None:
    collect = Counted()
    collect.may_end.set()
    collect.error = OSError("no /proc")

    async def story() -> None:
        facts = SharedFacts(collect)
        with pytest.raises(OSError, match="no /proc"):
            await facts.get(anew=False)
        collect.error = None
        assert (await facts.get(anew=False)).at == 2.0

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


def test_a_node_tells_of_its_own_machine(tmp_path: Path) -> None:
    async def read(digest: str, offset: int, max_bytes: int) -> bytes:
        return b""

    async def story() -> NodeFacts:
        asked = 0

        def environment() -> dict[str, str]:
            nonlocal asked
            asked += 1
            return {"PATH": "/usr/bin:/bin"}

        node = Node(str(tmp_path), read, Collector(tmp_path, "127.0.0.1", environment))
        first, second = await node.facts(), await node.facts()
        assert first.at < second.at
        assert asked == 2
        assert abs(await node.now() - time.time()) < 5
        return second

    facts = asyncio.run(asyncio.wait_for(story(), LIMIT_S))
    assert (facts.hostname, facts.ip, facts.scratch) == (socket.gethostname(), "127.0.0.1", str(tmp_path))
    assert [item.name for item in facts.interfaces if item.owns_ray_ip] == ["lo"]
    assert facts.memory_bytes > 0


# Name look-ups.


def test_look_ups_go_on_all_at_once_and_end_at_the_limit() -> None:
    hung = threading.Event()
    both = threading.Barrier(2)

    def resolve(ip: str) -> str:
        if ip == "10.0.0.9":
            hung.wait(LIMIT_S)
        if ip == "10.0.0.8":
            raise socket.herror(1, "Unknown host")
        both.wait(LIMIT_S)
        return f"name-of-{ip}"

    started = time.monotonic()
    found = asyncio.run(look_up(["10.0.0.6", "10.0.0.7", "10.0.0.8", "10.0.0.9"], 0.5, resolve))
    assert time.monotonic() - started < 5
    hung.set()
    assert [(item.ip, item.name) for item in found] == [
        ("10.0.0.6", "name-of-10.0.0.6"),
        ("10.0.0.7", "name-of-10.0.0.7"),
        ("10.0.0.8", None),
        ("10.0.0.9", None),
    ]
    assert all(item.seconds < 0.5 for item in found[:3])
    assert found[3].seconds == 0.5


def test_without_peers_nothing_is_looked_up() -> None:
    assert asyncio.run(look_up([], 5.0)) == ()
