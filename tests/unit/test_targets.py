"""Where a command across nodes is to be run: names become places, or errors that say what there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycontrol.errors import JobNotFound, UsageError
from raycontrol.events import InstanceLost
from raycontrol.execution import Place, Target
from raycontrol.placement import Node
from raycontrol.targets import places
from tests.unit.lifecycle_jobs import ATTEMPT, after, closed, queued, running

ROOMS = (
    Node(id="bbbb2222", name="host-b", ip="10.0.0.2", total={}, free={}),
    Node(id="aaaa1111", name="host-a", ip="10.0.0.1", total={}, free={}),
)


def names(target: Target, rooms: tuple[Node, ...] = ROOMS) -> list[str]:
    return [
        place.name for place in places("east", target, rooms, {"digits-1": running(), "waits-1": queued()})
    ]


def test_nodes_are_chosen_by_names_ips_and_beginnings_of_ids() -> None:
    assert places("east", Target(all=True), ROOMS, {}) == (
        Place("host-a", "aaaa1111", "east"),
        Place("host-b", "bbbb2222", "east"),
    )
    assert names(Target(nodes=("host-b", "10.0.0.1"))) == ["host-a", "host-b"]
    assert names(Target(nodes=("bbbb",))) == ["host-b"]


def test_nodes_with_one_name_are_told_apart_and_can_be_chosen_so() -> None:
    twins = (*ROOMS, Node(id="cccc3333", name="host-a", ip="10.0.0.1", total={}, free={}))
    assert names(Target(all=True), twins) == ["host-a/aaaa1111", "host-a/cccc3333", "host-b"]
    assert names(Target(nodes=("host-a/cccc3333",)), twins) == ["host-a/cccc3333"]


def test_a_group_of_nodes_is_those_that_are_there() -> None:
    rooms = (replace(ROOMS[0], groups=frozenset({"train"})), ROOMS[1])
    assert names(Target(group="train"), rooms) == ["host-b"]
    with pytest.raises(UsageError, match="no node of the group train is in the cluster now"):
        names(Target(group="train"))


def test_one_unknown_name_is_an_error_for_all() -> None:
    with pytest.raises(UsageError, match=r"no node 'host-c'; the cluster has host-a \(10.0.0.1\), host-b"):
        names(Target(nodes=("host-a", "host-c")))
    with pytest.raises(UsageError, match="the cluster has no nodes"):
        names(Target(all=True), ())


def test_where_absent_nodes_count_they_are_places_that_are_nowhere() -> None:
    target = Target(nodes=("host-a", "host-c"), absent_too=True)
    assert places("east", target, ROOMS, {}) == (
        Place("host-a", "aaaa1111", "east"),
        Place("host-c", "", "east"),
    )
    assert places("east", Target(nodes=("host-c",), absent_too=True), ROOMS, {}) == (
        Place("host-c", "", "east"),
    )


def test_a_jobs_instances_are_chosen_by_names_and_groups() -> None:
    assert places("east", Target(job="digits-1", group="worker"), (), {"digits-1": running()}) == (
        Place("worker-0", "node-b", "east", "digits-1.0", "worker-0"),
    )
    assert names(Target(job="digits-1")) == ["master-0", "worker-0"]
    assert names(Target(job="digits-1", instances=("master-0",))) == ["master-0"]
    with pytest.raises(
        UsageError, match="job digits-1 has no instance 'worker-7'; there are master-0, worker-0"
    ):
        names(Target(job="digits-1", instances=("worker-7",)))
    with pytest.raises(UsageError, match="job digits-1 has no group 'ps'; there are master, worker"):
        names(Target(job="digits-1", group="ps"))


def test_a_failed_job_that_is_kept_can_be_looked_into_but_not_where_an_instance_was_lost() -> None:
    lost = after(running(), InstanceLost(1018.0, ATTEMPT, "worker-0", "its node left the cluster"))
    kept = replace(after(lost, closed("master-0")), kept_until=1090.0)
    (place,) = places("east", Target(job="digits-1"), (), {"digits-1": kept})
    assert place.name == "master-0"


def test_a_job_none_of_whose_instances_runs_says_so() -> None:
    with pytest.raises(UsageError, match="is QUEUED: none of its instances runs now"):
        names(Target(job="waits-1"))
    with pytest.raises(JobNotFound):
        names(Target(job="gone-1"))
