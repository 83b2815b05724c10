"""Who may do what, on every route there is: a route that is not in the table fails."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycontrol import tokens
from raycontrol.access import RULES, Action, Role
from raycontrol.api.app import OPEN
from raycontrol.api.guards import Guard, JobGuard
from raycontrol.api.queries import known_parameters
from raycontrol.hardware import NodeInfo
from raycontrol.status import JobState
from tests.api.fakes import DIGEST, Api, adas_job, lost, until, write_log
from tests.fake_client import job_info

EVERYBODY = {"viewer", "user", "operator", "admin"}
NO_VIEWER = EVERYBODY - {"viewer"}
ADMINS = {"admin"}

WHO_MAY = {
    "POST /api/v1/jobs": NO_VIEWER,
    "GET /api/v1/jobs": EVERYBODY,
    "GET /api/v1/ids": EVERYBODY,
    "POST /api/v1/doubts": NO_VIEWER,
    "GET /api/v1/jobs/{job_id}": EVERYBODY,
    "DELETE /api/v1/jobs/{job_id}": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/stop": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/hold": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/release": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/suspend": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/resume": NO_VIEWER,
    "PUT /api/v1/jobs/{job_id}/priority": NO_VIEWER,
    "POST /api/v1/jobs/{job_id}/exec": NO_VIEWER,
    "POST /api/v1/exec": ADMINS,
    "GET /api/v1/jobs/{job_id}/instances": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/members": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/plan": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/usage": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/events": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/events/stream": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/logs": EVERYBODY,
    "POST /api/v1/jobs/{job_id}/logs/read": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/logs/stream": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/logs/{instance}": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/logs/{instance}/tail_offset": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/logs.tar": EVERYBODY,
    "GET /api/v1/jobs/{job_id}/outputs.tar": EVERYBODY,
    "HEAD /api/v1/packages/{digest}": NO_VIEWER,
    "PUT /api/v1/packages/{digest}": NO_VIEWER,
    "GET /api/v1/queue": EVERYBODY,
    "GET /api/v1/nodes": EVERYBODY,
    "GET /api/v1/nodes/{name}": EVERYBODY,
    "GET /api/v1/offline_nodes": EVERYBODY,
    "POST /api/v1/nodes/offline": ADMINS,
    "POST /api/v1/nodes/online": ADMINS,
    "GET /api/v1/node_groups": EVERYBODY,
    "POST /api/v1/node_groups/{group}/add": ADMINS,
    "POST /api/v1/node_groups/{group}/remove": ADMINS,
    "GET /api/v1/sizes": EVERYBODY,
    "GET /api/v1/tokens": ADMINS,
    "POST /api/v1/tokens": ADMINS,
    "DELETE /api/v1/tokens/{name}": ADMINS,
    "GET /api/v1/audit": ADMINS,
    "GET /metrics": EVERYBODY,
}
WHO_MAY |= {f"HEAD {key[4:]}": roles for key, roles in WHO_MAY.items() if key.startswith("GET ")}
CHANGES = {
    "POST /api/v1/jobs": "submit",
    "DELETE /api/v1/jobs/{job_id}": "delete",
    "POST /api/v1/jobs/{job_id}/stop": "stop",
    "POST /api/v1/jobs/{job_id}/hold": "hold",
    "POST /api/v1/jobs/{job_id}/release": "release",
    "POST /api/v1/jobs/{job_id}/suspend": "suspend",
    "POST /api/v1/jobs/{job_id}/resume": "resume",
    "PUT /api/v1/jobs/{job_id}/priority": "priority",
    "POST /api/v1/jobs/{job_id}/exec": "exec",
    "POST /api/v1/exec": "exec",
    "PUT /api/v1/packages/{digest}": "upload",
    "POST /api/v1/nodes/offline": "set nodes offline",
    "POST /api/v1/nodes/online": "set nodes online",
    "POST /api/v1/node_groups/{group}/add": "add nodes to group",
    "POST /api/v1/node_groups/{group}/remove": "remove nodes from group",
    "POST /api/v1/tokens": "create token",
    "DELETE /api/v1/tokens/{name}": "revoke token",
}
PLACES = {
    "{job_id}": "digits-ab12cd",
    "{instance}": "worker-0",
    "{digest}": DIGEST,
    "{name}": "host-a",
    "{group}": "a100",
}


def routes(api: Api) -> Iterator[tuple[str, Any]]:
    """Every method and path of the application, with its route."""
    for route in api.app._app.routes:  # type: ignore[attr-defined]
        if route.path not in OPEN:
            for method in route.methods:
                yield f"{method} {route.path}", route


def guards_of(dependant: Any) -> list[Guard]:
    inner = [guard for item in dependant.dependencies for guard in guards_of(item)]
    return [*inner, *([dependant.call] if isinstance(dependant.call, Guard) else [])]


@pytest.fixture
def ended(make_api: Callable[..., Api]) -> Api:
    """A server with an ended job of ada's, and no limit on requests."""
    api = make_api(burst=100_000, failures_burst=100_000)
    reset(api)
    write_log(api.home, b"done\n")
    api.door.known_nodes = [NodeInfo(id="1", name="host-a", ip="10.0.0.1")]
    return api


def reset(api: Api) -> None:
    """Put back what a request may have removed."""
    if not api.door.find("digits-ab12cd"):
        api.door.put(adas_job(JobState.SUCCEEDED))
    api.door.whole.add(DIGEST)


def ask(api: Api, key: str, by: str | None) -> Any:
    method, path = key.split(" ")
    for place, value in PLACES.items():
        path = path.replace(place, value)
    reset(api)
    return api.request(method, path, by=by)


def test_every_route_has_one_guard_and_is_in_the_table(api: Api) -> None:
    found = dict(routes(api))
    assert found.keys() == WHO_MAY.keys()
    for key, route in found.items():
        (guard,) = guards_of(route.dependant)
        assert isinstance(guard, JobGuard) == ("{job_id}" in key), key
        assert guard.change == CHANGES.get(key), key


def test_without_a_good_token_no_route_answers(ended: Api) -> None:
    expired = ended.door.let_in("expired", "root", Role.ADMIN, ttl_s=-1)
    revoked = ended.door.let_in("revoked", "root", Role.ADMIN)
    ended.door.revoke_token("revoked")
    ended.door.audited.clear()
    for key, _ in routes(ended):
        for by in (None, "nonsense", tokens.new_token(), expired, revoked):
            answer = ask(ended, key, by)
            assert answer.status_code == 401, (key, by)
            assert answer.headers["www-authenticate"] == 'Bearer realm="raycontrol"'
            assert "digits" not in answer.text
    assert (ended.door.calls, ended.door.audited) == ([], [])


@pytest.mark.parametrize("role", ["viewer", "user", "operator", "admin"])
def test_a_role_may_what_the_table_says(ended: Api, role: str) -> None:
    """The token of the role ``user`` is that of ada, whose job it is."""
    for key, _ in routes(ended):
        status = ask(ended, key, role).status_code
        if role in WHO_MAY[key]:
            assert status not in (401, 403, 500), (key, status)
            assert status != 404 or "{job_id}" not in key or key.endswith("/plan"), (key, status)
        else:
            assert status == 403, (key, status)


ROWS = {
    "read jobs": Action.READ_JOB,
    "submit": Action.SUBMIT,
    "change jobs": Action.CHANGE_JOB,
    "look at the cluster": Action.READ_CLUSTER,
    "look into nodes": Action.READ_NODE,
    "say what nodes are for": Action.MANAGE_NODES,
    "run commands in jobs": Action.RUN_IN_JOB,
    "run commands on nodes": Action.RUN_ON_NODES,
    "have tokens": Action.MANAGE_TOKENS,
    "read the audit": Action.READ_AUDIT,
}


def documented() -> dict[str, list[str]]:
    """The rows of the table of roles in docs/api.md, by their first cell."""
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    _, _, table = text.partition("| to | requests | `viewer` | `user` | `operator` | `admin` |\n")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_documented_roles_are_those_of_the_rules(api: Api) -> None:
    rows = documented()
    assert rows.keys() == ROWS.keys()
    for name, (_, *cells) in rows.items():
        may = {role for role, cell in zip(Role, cells, strict=True) if cell != "–"}
        assert may == RULES[ROWS[name]], name


def test_every_route_is_in_its_row_of_the_documented_roles(api: Api) -> None:
    rows = documented()
    below = re.compile(r"GET /jobs/\{job_id\}/.+")
    found = dict(routes(api))
    for key, route in found.items():
        (guard,) = guards_of(route.dependant)
        (requests,) = [cells[0] for name, cells in rows.items() if ROWS[name] is guard.action]
        method, path = key.replace("/api/v1", "").split(" ")
        if method == "HEAD" and f"GET {key[5:]}" in found:
            continue
        short = "GET /jobs/{job_id}/…" if below.fullmatch(f"{method} {path}") else f"{method} {path}"
        beside = f"…/{path.rpartition('/')[2]}"  # after another of the same method and folder
        assert f"`{short}`" in requests or f"`{beside}`" in requests, key


def test_a_refusal_names_the_roles_that_may(ended: Api) -> None:
    for key, may in WHO_MAY.items():
        roles = [role.value for role in Role if role in may]
        named = roles[0] if len(roles) == 1 else f"{', '.join(roles[:-1])} or {roles[-1]}"
        for role in EVERYBODY - may:
            said = "" if key.startswith("HEAD ") else ask(ended, key, role).json()["detail"]
            assert said in ("", f"this needs the role {named}; that of this token is {role}")
    checked = ended.get("/api/v1/nodes?check=true", by="viewer")
    assert checked.status_code == 403
    assert (
        checked.json()["detail"]
        == "a check of nodes needs the role operator or admin; that of this token is viewer"
    )


def test_no_route_takes_a_parameter_that_it_does_not_know(ended: Api) -> None:
    """Whatever it does with those that it knows. Nobody without a token is told what there is."""
    for key, route in routes(ended):
        method, path = key.split(" ")
        for place, value in PLACES.items():
            path = path.replace(place, value)
        known = known_parameters(route)
        answer = ended.request(method, f"{path}?labels=x&next=2&labels=y")
        assert answer.status_code == 422, key
        assert ended.request(method, f"{path}?labels=x", by=None).status_code == 401, key
        if method != "HEAD":
            there_are = f"there are {', '.join(known)}" if known else "there are none"
            rule = f"is no parameter of this request; {there_are}"
            found = [(fault["field"], fault["rule"]) for fault in answer.json()["faults"]]
            assert found == [("labels", rule), ("next", rule)], key
    assert ended.door.calls == []


def test_the_parameters_of_a_route_are_known_by_name(api: Api) -> None:
    found = {key: known_parameters(route) for key, route in routes(api)}
    assert found["GET /api/v1/jobs"] == ("state", "user", "label", "text", "limit", "after")
    assert found["GET /api/v1/jobs/{job_id}/events"] == ("after", "wait_s")
    assert found["GET /api/v1/sizes"] == ()


def test_another_s_job_is_not_there(ended: Api) -> None:
    for key, _ in routes(ended):
        if "{job_id}" not in key:
            continue
        answer = ask(ended, key, "other")
        unknown = ended.request(*key.replace("{job_id}", "digits-zzzzzz").split(" "), by="other")
        assert (answer.status_code, unknown.status_code) == (404, 404), key
        if key.startswith("HEAD "):
            continue
        assert answer.json()["detail"] == "no job 'digits-ab12cd'"
        assert answer.json().keys() == unknown.json().keys()
    assert ended.door.calls == []


def test_the_kind_of_authorization_matters(api: Api) -> None:
    for header in (f"Basic {api.tokens['admin']}", api.tokens["admin"], "Bearer", "Bearer ", "Bearer\trct"):
        assert api.get("/api/v1/jobs", by=None, headers={"Authorization": header}).status_code == 401
    headers = {"Cookie": f"token={api.tokens['admin']}"}
    assert api.get(f"/api/v1/jobs?token={api.tokens['admin']}", by=None, headers=headers).status_code == 401


def test_a_good_token_is_asked_for_once_in_a_while(api: Api) -> None:
    for _ in range(10):
        assert api.get("/api/v1/jobs").status_code == 200
    assert api.door.asked_for_tokens == 1


def test_facts_of_nodes_are_for_operators(api: Api) -> None:
    api.door.put(adas_job())
    api.door.put(job_info("bobs-1", user="bob", state=JobState.RUNNING))
    facts = {
        "hostname": "a",
        "ip": "10.0.0.1",
        "at": 1,
        "kernel": "6",
        "cores": 2,
        "memory_bytes": 1,
        "shm_bytes": 1,
        "scratch": "/tmp",
        "scratch_free_bytes": 1,
        "open_files": {"soft": 1, "hard": 1},
        "memlock": {"soft": 1, "hard": 1},
    }
    node = {
        "id": "1",
        "name": "host-a",
        "ip": "10.0.0.1",
        "jobs": ["digits-ab12cd", "bobs-1"],
        "facts": facts,
    }
    api.door.known_nodes = [NodeInfo.model_validate(node)]
    seen = {}
    for by in ("user", "viewer", "operator"):
        (found,) = api.get("/api/v1/nodes", by=by).json()
        seen[by] = found["facts"] is not None, found["jobs"]
        assert api.get("/api/v1/nodes/host-a", by=by).json() == found
        assert api.get("/api/v1/nodes?check=true", by=by).status_code == (200 if by == "operator" else 403)
    assert seen == {
        "user": (False, ["digits-ab12cd"]),
        "viewer": (False, ["digits-ab12cd", "bobs-1"]),
        "operator": (True, ["digits-ab12cd", "bobs-1"]),
    }
    assert api.get("/api/v1/nodes/host-z").status_code == 404


def test_a_token_that_asks_too_often_has_to_wait(make_api: Callable[..., Api]) -> None:
    api = make_api(burst=3, rate_per_s=0.1)
    statuses = [api.get("/api/v1/jobs", by="user").status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = api.post("/api/v1/jobs", by="user", json={})
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert api.get("/api/v1/jobs", by="other").status_code == 200
    assert api.door.audited == []


def test_a_token_that_was_revoked_is_no_reason_to_refuse_good_ones(make_api: Callable[..., Api]) -> None:
    api = make_api(failures_burst=1, failures_per_s=0.01, strangers_burst=0)
    assert api.get("/api/v1/jobs", by="user").status_code == 200
    assert api.request("DELETE", "/api/v1/tokens/other").status_code == 200
    assert api.get("/api/v1/jobs", by="other").status_code == 401
    assert api.request("DELETE", "/api/v1/tokens/viewer").status_code == 200
    assert api.get("/api/v1/jobs", by="user").status_code == 200
    assert api.get("/api/v1/jobs", by="operator").status_code == 429


def test_a_good_token_from_an_address_that_guesses_is_looked_at(make_api: Callable[..., Api]) -> None:
    api = make_api(failures_burst=1, failures_per_s=0.01, strangers_burst=2, strangers_per_s=0.01)
    assert [api.get("/api/v1/jobs", by="nonsense").status_code for _ in range(5)] == [401, *[429] * 4]
    assert api.get("/api/v1/jobs", by="user").status_code == 200


def test_a_token_that_nobody_could_look_at_is_no_guess(make_api: Callable[..., Api]) -> None:
    api = make_api(failures_burst=1, failures_per_s=0.01, strangers_burst=0)
    api.door.error = lost()
    assert [api.get("/api/v1/jobs", by="user").status_code for _ in range(3)] == [503] * 3
    api.door.error = None
    assert api.get("/api/v1/jobs", by="user").status_code == 200


def test_guesses_that_come_at_the_same_time_are_counted_one_by_one(make_api: Callable[..., Api]) -> None:
    api = make_api(failures_burst=3, failures_per_s=0.01, strangers_burst=0)
    slow, answered = threading.Event(), []
    api.door.pause = slow

    async def guess() -> None:
        answered.append(
            (await api._request("GET", "/api/v1/jobs", api._login(tokens.new_token()), {})).status_code
        )
        slow.set()

    async def all_at_once() -> None:
        await asyncio.gather(*(guess() for _ in range(10)))

    api.run(all_at_once())
    assert sorted(answered) == [401] * 3 + [429] * 7


def test_many_requests_with_one_token_are_one_guess_while_it_is_looked_at(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(failures_burst=1, failures_per_s=0.01, strangers_burst=0)

    async def all_at_once() -> list[int]:
        asking = (api._request("GET", "/api/v1/jobs", api._login("viewer"), {}) for _ in range(40))
        return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert api.run(all_at_once()) == [200] * 40
    assert [api.get("/api/v1/jobs", by=tokens.new_token()).status_code for _ in range(2)] == [401, 429]


@pytest.mark.parametrize("path", ["logs/worker-0?follow=1", "logs/stream", "events/stream"])
def test_a_stream_ends_with_its_token(make_api: Callable[..., Api], path: str) -> None:
    api = make_api(recheck_s=0.02)
    api.door.put(adas_job())
    write_log(api.home, b"one\n")
    with api.live(f"/api/v1/jobs/digits-ab12cd/{path}", by="user") as answer:
        until(lambda: "data: " in answer.text, "the first line")
        api.door.error = lost()
        until(lambda: api.door.refused > 2, "looks at the token")
        assert not answer.over
        api.door.error = None
        assert api.request("DELETE", "/api/v1/tokens/user").status_code == 200
        until(lambda: answer.over, "the end of the stream")
    assert "event: end" not in answer.text
    assert answer.ended


@pytest.mark.parametrize("path", ["outputs.tar", "logs.tar", "logs/worker-0"])
def test_a_download_ends_with_its_token_and_does_not_look_whole(
    make_api: Callable[..., Api], path: str
) -> None:
    api = make_api(recheck_s=0.02)
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"x" * (1 << 20))
    outputs = api.home / "jobs/digits-ab12cd/outputs/worker-0"
    outputs.mkdir(parents=True)
    (outputs / "model.bin").write_bytes(b"x" * (1 << 20))
    with api.live(f"/api/v1/jobs/digits-ab12cd/{path}", by="user", most=2) as answer:
        until(lambda: len(answer.body) > 1000, "the first of it")
        assert api.request("DELETE", "/api/v1/tokens/user").status_code == 200
        until(lambda: answer.over, "the end of the download")
    assert len(answer.body) < 1 << 20
    assert not answer.ended


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/jobs", {"spec": {"command": "true"}}),
        ("/api/v1/jobs/digits-ab12cd/stop", {"why": "late"}),
        ("/api/v1/jobs/digits-ab12cd/logs/read", {"attempt": 0, "offsets": {}}),
    ],
)
def test_a_token_that_is_revoked_while_a_body_comes_does_nothing_any_more(
    api: Api, path: str, body: dict[str, Any]
) -> None:
    api.door.put(adas_job())
    headers = {"Content-Type": "application/json"}
    with api.live(path, by="user", headers=headers, body=body, late=True) as answer:
        until(lambda: api.door.asked_for_tokens == 1, "the look at the token")
        assert api.request("DELETE", "/api/v1/tokens/user").status_code == 200
        api.run(answer.finish())
        until(lambda: answer.over, "the answer")
    assert answer.status == 401
    assert (api.door.submissions, api.door.calls) == ({}, [])


def test_an_address_that_guesses_has_to_wait_and_good_tokens_from_there_go_on(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(failures_burst=3, failures_per_s=0.1, strangers_burst=1, strangers_per_s=0.1)
    assert api.get("/api/v1/jobs", by="user").status_code == 200
    statuses = [api.get("/api/v1/jobs", by=tokens.new_token()).status_code for _ in range(5)]
    assert statuses == [401, 401, 401, 401, 429]
    assert api.get("/api/v1/jobs", by="user").status_code == 200
