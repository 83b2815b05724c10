"""Nodes that take no new job, and groups of nodes, over HTTP."""

from __future__ import annotations

from raycontrol.hardware import NodeGroup, OfflineNode
from tests.api.fakes import Api
from tests.api.test_http_door import door_of


def test_an_admin_sets_nodes_offline_and_online_and_the_audit_says_who(api: Api) -> None:
    answer = api.post(
        "/api/v1/nodes/offline", json={"nodes": ["host-a", "host-b"], "reason": "fan"}, by="admin"
    )
    assert answer.status_code == 200
    assert [(mark["name"], mark["reason"], mark["by"]) for mark in answer.json()] == [
        ("host-a", "fan", "root"),
        ("host-b", "fan", "root"),
    ]
    assert api.post("/api/v1/nodes/online", json={"nodes": ["host-a"]}, by="admin").json() == ["host-a"]
    assert api.door.calls == [
        ("set_offline", ["host-a", "host-b"], "fan", "root"),
        ("set_online", ["host-a"], "root"),
    ]
    entries = [(entry.action, entry.target, entry.user, entry.status) for entry in api.door.audited]
    assert entries == [
        ("set nodes offline", "host-a,host-b", "root", 200),
        ("set nodes online", "host-a", "root", 200),
    ]


def test_others_may_look_at_groups_and_change_nothing(api: Api) -> None:
    groups = [{"name": "a100", "nodes": ["host-a", "host-z"], "absent": ["host-z"]}]
    assert api.get("/api/v1/node_groups", by="viewer").json() == groups
    offline = [{"name": "host-z", "reason": "fan", "by": "root", "at": 1.0, "absent": True}]
    assert api.get("/api/v1/offline_nodes", by="viewer").json() == offline
    for path in ("nodes/offline", "nodes/online", "node_groups/a100/add", "node_groups/a100/remove"):
        answer = api.post(f"/api/v1/{path}", json={"nodes": ["host-a"]}, by="operator")
        assert answer.status_code == 403 and "needs the role admin" in answer.json()["detail"]
    assert api.door.calls == []


def test_a_request_about_no_node_or_without_a_reason_is_refused(api: Api) -> None:
    for path, body in (
        ("nodes/offline", {"nodes": ["a"]}),
        ("nodes/offline", {"nodes": [], "reason": "fan"}),
        ("nodes/online", {"nodes": []}),
        ("node_groups/a100/add", {"nodes": None}),
    ):
        assert api.post(f"/api/v1/{path}", json=body, by="admin").status_code == 422
    assert api.door.calls == []


def test_the_door_over_http_says_the_same(api: Api) -> None:
    door = door_of(api, by="admin")
    assert door.set_offline(["host-a"], "fan", "not sent") == [
        OfflineNode(name="host-a", reason="fan", by="root", at=1.0)
    ]
    assert door.set_online(["host-a"], "not sent") == ["host-a"]
    assert [(node.name, node.absent) for node in door.offline_nodes()] == [("host-z", True)]
    assert door.node_groups() == [NodeGroup(name="a100", nodes=("host-a", "host-z"), absent=("host-z",))]
    assert door.add_to_group("big ones", ["host-a"], "not sent") == NodeGroup(
        name="big ones", nodes=("host-a",)
    )
    assert door.remove_from_group("a100", None, "not sent").nodes == ()
    assert api.door.calls[-2:] == [
        ("add_to_group", "big ones", ["host-a"], "root"),
        ("remove_from_group", "a100", None, "root"),
    ]
