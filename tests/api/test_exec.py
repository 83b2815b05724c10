"""Commands across nodes over HTTP: who may, what comes of them, how they end with their connection, what the audit tells."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from raycontrol import process
from raycontrol.client import Client
from raycontrol.errors import Forbidden, JobNotFound, UsageError
from raycontrol.execution import Command, Target, Wrote
from raycontrol.hardware import NodeInfo
from raycontrol.remote import HttpDoor
from raycontrol.settings import Settings
from raycontrol.status import JobState
from tests.api.fakes import Api, adas_job, until
from tests.api.test_http_door import URL, InProcess
from tests.exec_places import LocalWay
from tests.fake_client import instance
from tests.support import wait_until

JOB = "digits-ab12cd"


@pytest.fixture
def nodes(api: Api) -> Api:
    """A server of a cluster with two nodes, and a job of ada's."""
    api.door.known_nodes = [NodeInfo(id=str(i), name=f"n{i}", ip=f"10.0.0.{i}") for i in (1, 2)]
    api.door.put(adas_job(JobState.RUNNING, instances=(instance("worker-0"),)))
    api.door.way = LocalWay(api.home / "exec")
    return api


def client(api: Api, by: str) -> Client:
    """A client whose door is the application itself."""
    found = Client(url=URL, token=api.tokens[by], settings=Settings(home=str(api.home / "client")))
    found._remote = HttpDoor(URL, api.tokens[by], transport=InProcess(api))
    return found


def told(text: str) -> list[tuple[str, Any]]:
    events = [block.splitlines() for block in text.split("\n\n") if block.startswith("event: ")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in events]


def test_it_is_told_as_events(nodes: Api) -> None:
    answer = nodes.post("/api/v1/exec", json={"command": "echo $NODE; exit 3", "nodes": ["n1"]})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = told(answer.text)
    assert [kind for kind, _ in events] == ["places", "began", "output", "over", "end"]
    assert events[0][1] == {"places": ["n1"]}
    assert base64.b64decode(events[2][1]["data"]) == b"n1\n"
    assert events[3][1] == {"place": "n1", "status": 3, "code": 3, "signal": None, "why": None}


def test_a_client_gets_all_of_it(nodes: Api) -> None:
    with client(nodes, "admin").exec(
        "head -c 1M /dev/zero; echo $NODE >&2", all=True, parallel=1
    ) as outcomes:
        assert outcomes.status == 0 and list(outcomes) == ["n1", "n2"]
        assert outcomes["n2"].output == bytes(1 << 20) + b"n2\n"
    script = client(nodes, "admin").exec(["a b"], nodes=["n1"], script=b"echo \xff $1")
    assert script["n1"].output == b"\xff a b\n"
    script.close()


def test_users_run_commands_in_their_own_jobs(nodes: Api) -> None:
    with client(nodes, "user").job(JOB).exec("echo $NODE") as outcomes:
        assert outcomes["worker-0"].text == "worker-0\n"
    with pytest.raises(JobNotFound):
        client(nodes, "other").exec("true", job=JOB)
    with pytest.raises(Forbidden, match="needs the role admin"):
        client(nodes, "operator").exec("true", all=True)
    with pytest.raises(UsageError, match="root is for nodes"):
        client(nodes, "user").exec("true", job=JOB, root=True)
    with pytest.raises(UsageError, match="plain is for nodes"):
        client(nodes, "user").exec("true", job=JOB, plain=True)


def test_an_unknown_node_is_an_error_and_nothing_begins(nodes: Api) -> None:
    with pytest.raises(UsageError, match="no node 'n7'"):
        client(nodes, "admin").exec("true", nodes=["n1", "n7"])
    assert nodes.door.way is not None and nodes.door.way.begun == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": "true"},
        {"all": True},
        {"all": True, "nodes": ["n1"], "command": "true"},
        {"all": True, "command": "true", "timeout_s": 0},
        {"all": True, "command": 7},
        {"all": True, "script": "no base64!"},
        {"all": True, "command": "x", "script": "eA=="},
        {"all": True, "command": "true", "comand": "x"},
    ],
)
def test_what_is_no_command_is_refused(nodes: Api, body: dict[str, Any]) -> None:
    assert nodes.post("/api/v1/exec", json=body).status_code in (400, 422)
    assert nodes.door.way is not None and nodes.door.way.begun == []


def test_the_audit_tells_who_and_where_and_not_what(nodes: Api) -> None:
    nodes.post("/api/v1/exec", json={"command": "echo s3cret", "all": True})
    nodes.post(f"/api/v1/jobs/{JOB}/exec", json={"command": "echo s3cret"}, by="user")
    first, second = nodes.door.audited
    assert (first.action, first.target, first.user, first.status) == ("exec", "n[1-2]", "root", 200)
    assert (second.action, second.target, second.user) == ("exec", JOB, "ada")
    assert "s3cret" not in str(nodes.door.audited)


def test_who_leaves_has_it_ended(nodes: Api, tmp_path: Path) -> None:
    body = {"command": "echo began; sleep 1000", "all": True}
    with nodes.live("/api/v1/exec", body=body) as answer:
        until(lambda: answer.text.count("event: output") == 2, "both have begun")
        assert process.marked("test-exec", prefix=True)
    wait_until(lambda: not process.marked("test-exec", prefix=True), what="all of it is gone")


def test_one_token_has_so_many_at_a_time(make_api: Any) -> None:
    api = make_api(execs_per_token=1)
    api.door.known_nodes = [NodeInfo(id="1", name="n1", ip="10.0.0.1")]
    api.door.way = LocalWay(api.home / "exec")
    with api.live("/api/v1/exec", body={"command": "echo began; sleep 1000", "all": True}) as answer:
        until(lambda: "event: output" in answer.text, "it has begun")
        refused = api.post("/api/v1/exec", json={"command": "true", "all": True})
        assert (refused.status_code, refused.json()["detail"]) == (
            429,
            "token 'admin' has 1 commands across nodes at a time; wait for one to end",
        )
    wait_until(lambda: api.post("/api/v1/exec", json={"command": "true", "all": True}).status_code == 200)


def test_an_answer_that_came_too_late_leaves_nothing(make_api: Any) -> None:
    api = make_api(answer_s=0.5, calls=1)
    api.door.known_nodes = [NodeInfo(id="1", name="n1", ip="10.0.0.1")]
    api.door.way = LocalWay(api.home / "exec")
    api.door.exec_pause = threading.Event()
    before = followers()
    assert api.post("/api/v1/exec", json={"command": "true", "all": True}).status_code == 503
    api.door.exec_pause.set()
    # The one thread that asks the cluster has then done with the first.
    wait_until(lambda: api.post("/api/v1/exec", json={"command": "true", "all": True}).status_code == 200)
    assert followers() == before


def followers() -> int:
    """How many commands are followed in this process."""
    return sum(thread.name == "raycontrol-follow-exec" for thread in threading.enumerate())


def test_a_connection_that_is_lost_is_told_of_each_place(nodes: Api) -> None:
    with client(nodes, "admin").execute(Target(all=True), Command("echo hi")) as running:
        news = iter(running)
        assert isinstance(next(item for item in news if isinstance(item, Wrote)), Wrote)
        running.stop()
        assert {item.place for item in news} <= {"n1", "n2"}
