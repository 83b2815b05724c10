from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from raycontrol.access import Role
from raycontrol.api.problems import TooMany
from raycontrol.api.uploads import Uploads
from raycontrol.errors import StoreError
from raycontrol.status import ArrayInfo, JobState, MemberInfo, Reason
from tests.api.fakes import DIGEST, Api, adas_job, fault, lost, until
from tests.fake_client import job_info

SPEC = {"name": "digits", "command": "torchrun train.py"}


def test_a_submitted_job_belongs_to_the_user_of_the_token(api: Api) -> None:
    answer = api.post("/api/v1/jobs", by="user", json={"spec": SPEC, "job_id": "digits-1"})
    assert answer.status_code == 201
    assert answer.headers["location"] == "/api/v1/jobs/digits-1"
    assert answer.json()["user"] == "ada"
    assert api.door.submissions["digits-1"].spec.command == "torchrun train.py"


def test_a_submission_carries_the_request_s_id_and_origin_to_its_event(api: Api) -> None:
    answer = api.post("/api/v1/jobs", json={"spec": SPEC, "job_id": "a"}, headers={"X-Request-ID": "r-17"})
    assert answer.headers["x-request-id"] == "r-17"
    found = api.door.submissions["a"]
    assert (found.request_id, found.origin) == ("r-17", "10.0.0.9")


def test_a_job_without_an_id_gets_one_that_begins_with_its_name(api: Api) -> None:
    assert api.post("/api/v1/jobs", json={"spec": SPEC}).json()["id"].startswith("digits-")


def test_yaml_is_the_spec_itself(api: Api) -> None:
    text = "name: digits\ncommand: torchrun train.py\nlabels: {team: vision}\n"
    headers = {"Content-Type": "application/yaml"}
    answer = api.post("/api/v1/jobs?job_id=y", content=text, headers=headers)
    assert (answer.status_code, answer.json()["labels"]) == (201, {"team": "vision"})


def test_the_same_id_again_submits_nothing(api: Api) -> None:
    body = {"spec": SPEC, "job_id": "digits-1"}
    assert api.post("/api/v1/jobs", json=body).status_code == 201
    assert api.post("/api/v1/jobs", json=body).status_code == 200
    assert len(api.door.submissions) == 1


def test_the_same_key_again_submits_nothing(api: Api) -> None:
    first = api.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
    again = api.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]


def test_of_requests_that_submit_the_same_job_at_once_one_has_made_it(api: Api) -> None:
    async def submit() -> int:
        body = {"json": {"spec": SPEC, "job_id": "digits-1"}}
        return (await api._request("POST", "/api/v1/jobs", api._login("user"), body)).status_code

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(submit() for _ in range(8)))

    assert sorted(api.run(all_at_once())) == [200] * 7 + [201]


def test_what_belongs_into_a_json_body_is_not_taken_from_the_query(api: Api) -> None:
    refused = api.post(f"/api/v1/jobs?job_id=digits-1&package={DIGEST}", json={"spec": SPEC})
    assert (refused.status_code, api.door.submissions) == (422, {})
    assert [(fault["field"], fault["rule"]) for fault in refused.json()["faults"]] == [
        ("job_id", "goes into the body where that is JSON"),
        ("package", "goes into the body where that is JSON"),
    ]


def test_a_label_that_is_asked_for_with_two_values_is_refused(api: Api) -> None:
    api.door.put(adas_job())
    refused = api.get("/api/v1/jobs?label=team=vision&label=team=speech")
    assert (refused.status_code, refused.json()["detail"]) == (422, "label: must have one value, got team")
    assert api.get("/api/v1/jobs?label=team=vision&label=team=vision").status_code == 200


def test_a_key_of_another_request_is_refused(api: Api) -> None:
    api.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
    other = {"spec": {**SPEC, "nodes": 2}}
    answer = api.post("/api/v1/jobs", json=other, headers={"Idempotency-Key": "k1"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:raycontrol:key-reused")


def test_another_s_job_id_is_taken_and_nothing_of_that_job_is_told(api: Api) -> None:
    api.door.put(adas_job())
    answer = api.post("/api/v1/jobs", by="other", json={"spec": SPEC, "job_id": "digits-ab12cd"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:raycontrol:id-taken")
    assert answer.json()["detail"] == "job id 'digits-ab12cd' is taken; choose another"


def test_the_id_of_a_removed_job_is_never_used_again(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    assert api.request("DELETE", "/api/v1/jobs/digits-ab12cd", by="user").status_code == 204
    answer = api.post("/api/v1/jobs", by="user", json={"spec": SPEC, "job_id": "digits-ab12cd"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:raycontrol:id-taken")
    assert "was used by a job that has been removed; choose another" in answer.json()["detail"]


def test_every_fault_of_a_spec_is_told(api: Api) -> None:
    answer = api.post("/api/v1/jobs", json={"spec": {"nodes": 0, "priority": 12}})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["type"] == "urn:raycontrol:spec-error"
    assert [fault["field"] for fault in answer.json()["faults"]] == ["command", "nodes", "priority"]


def test_faults_of_yaml_have_their_places(api: Api) -> None:
    headers = {"Content-Type": "application/yaml"}
    answer = api.post("/api/v1/jobs", content="command: a\nnodes: 0\n", headers=headers)
    fault = {"field": "nodes", "rule": "must be at least 1", "got": "0", "line": 2, "column": 8}
    assert answer.json()["faults"] == [fault]


def test_faults_of_the_body_around_the_spec_are_told_too(api: Api) -> None:
    answer = api.post("/api/v1/jobs", json={"spec": SPEC, "package": "x", "jobid": "a"})
    assert answer.status_code == 422
    assert {fault["field"] for fault in answer.json()["faults"]} == {"package", "jobid"}


def test_a_working_dir_has_to_be_uploaded(api: Api) -> None:
    spec = {**SPEC, "working_dir": "/etc"}
    answer = api.post("/api/v1/jobs", json={"spec": spec})
    assert [fault["field"] for fault in answer.json()["faults"]] == ["working_dir"]
    missing = api.post("/api/v1/jobs", json={"spec": spec, "package": DIGEST})
    assert missing.json()["detail"] == "package: is not in the archive; upload it with PUT first"
    api.door.whole.add(DIGEST)
    assert api.post("/api/v1/jobs", json={"spec": spec, "package": DIGEST}).status_code == 201


def test_an_open_secret_is_not_taken_from_the_server_s_environment(api: Api) -> None:
    answer = api.post("/api/v1/jobs", json={"spec": {**SPEC, "secret_env": {"PATH": None}}})
    assert answer.status_code == 422
    assert answer.json()["faults"][0]["field"] == "secret_env.PATH"


def test_all_that_a_spec_lacks_is_told_in_one_answer_with_its_place(api: Api) -> None:
    text = "nodes: 0\nsecret_env:\n  HF_TOKEN:\n  OTHER: x\nworking_dir: code\nmodes: ddp\ncommand: python train.py\n"
    answer = api.post("/api/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert answer.status_code == 422
    assert [(fault["line"], fault["field"]) for fault in answer.json()["faults"]] == [
        (1, "nodes"),
        (3, "secret_env.HF_TOKEN"),
        (5, "working_dir"),
        (6, "modes"),
    ]
    spec = {**SPEC, "nodes": 0, "secret_env": {"HF_TOKEN": None, "OTHER": "x"}}
    answer = api.post("/api/v1/jobs", json={"spec": spec})
    assert [fault["field"] for fault in answer.json()["faults"]] == ["nodes", "secret_env.HF_TOKEN"]


def test_a_secret_reaches_the_controller_and_no_answer(api: Api) -> None:
    spec = {**SPEC, "secret_env": {"HF_TOKEN": "hf_verysecret"}}
    answer = api.post("/api/v1/jobs", json={"spec": spec, "job_id": "s"})
    assert answer.status_code == 201
    assert "hf_verysecret" not in answer.text
    assert api.door.submissions["s"].spec.secrets() == {"HF_TOKEN": "hf_verysecret"}


def test_a_wrong_secret_is_not_repeated(api: Api) -> None:
    spec = {**SPEC, "secret_env": {"HF_TOKEN": ["hf_verysecret"]}, "env": {"API_KEY": ["hf_verysecret"]}}
    answer = api.post("/api/v1/jobs", json={"spec": spec})
    assert answer.status_code == 422
    assert "hf_verysecret" not in answer.text


def test_other_content_types_are_refused(api: Api) -> None:
    answer = api.post("/api/v1/jobs", content=b"<job/>", headers={"Content-Type": "text/xml"})
    assert answer.status_code == 415


def test_a_list_comes_in_pages(api: Api) -> None:
    for number in range(5):
        api.door.put(job_info(f"job-{number}", submitted_at=1000.0 + number))
    first = api.get("/api/v1/jobs?limit=2").json()
    second = api.get("/api/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    third = api.get("/api/v1/jobs", params={"limit": 2, "after": second["next"]}).json()
    ids = [[job["id"] for job in page["jobs"]] for page in (first, second, third)]
    assert ids == [["job-4", "job-3"], ["job-2", "job-1"], ["job-0"]]
    assert third["next"] is None


def test_jobs_are_found_by_state_user_label_and_text(api: Api) -> None:
    api.door.put(job_info("a-1", labels={"team": "vision"}, submitted_at=1.0))
    api.door.put(job_info("b-1", state=JobState.FAILED, user="bob", submitted_at=2.0))
    for query, ids in (
        ("state=QUEUED&state=RUNNING", ["a-1"]),
        ("user=bob", ["b-1"]),
        ("label=team=vision", ["a-1"]),
        ("text=B-1", ["b-1"]),
        ("", ["b-1", "a-1"]),
    ):
        assert [job["id"] for job in api.get(f"/api/v1/jobs?{query}").json()["jobs"]] == ids


def test_a_user_sees_his_own_jobs_only(api: Api) -> None:
    api.door.put(adas_job())
    api.door.put(job_info("bobs-1", user="bob", state=JobState.QUEUED, submitted_at=2.0))
    seen = {
        by: [job["id"] for job in api.get("/api/v1/jobs", by=by).json()["jobs"]]
        for by in ("user", "other", "viewer")
    }
    assert seen == {"user": ["digits-ab12cd"], "other": ["bobs-1"], "viewer": ["digits-ab12cd", "bobs-1"]}
    assert api.get("/api/v1/jobs?user=ada", by="other").json() == {"jobs": [], "next": None}
    assert api.get("/api/v1/ids?prefix=d", by="other").json() == []
    assert api.get("/api/v1/ids?prefix=d", by="user").json() == ["digits-ab12cd"]
    assert api.get("/api/v1/ids?prefix=d", by="operator").json() == ["digits-ab12cd"]
    assert api.get("/api/v1/queue", by="user").json() == []


def test_the_queue_is_in_its_order_with_reasons(api: Api) -> None:
    api.door.put(job_info("late-1", submitted_at=9.0, pending="1 ahead in the queue"))
    api.door.put(job_info("early-1", submitted_at=3.0, pending="needs 2 nodes", user="bob"))
    found = [(item["position"], item["id"], item["why"]) for item in api.get("/api/v1/queue").json()]
    assert found == [(1, "early-1", "needs 2 nodes"), (2, "late-1", "1 ahead in the queue")]
    assert [item["position"] for item in api.get("/api/v1/queue", by="user").json()] == [2]


def test_the_queue_has_the_jobs_of_this_cluster_alone(api: Api) -> None:
    api.door.put(job_info("ours-1", submitted_at=2.0))
    api.door.put(job_info("theirs-1", submitted_at=1.0, cluster="west"))
    api.door.put(job_info("inside-1", submitted_at=1.0, cluster="embedded-5f0c"))
    assert [(item["position"], item["id"]) for item in api.get("/api/v1/queue").json()] == [(1, "ours-1")]


def test_only_who_looks_at_a_job_itself_makes_its_plan(api: Api) -> None:
    api.door.put(adas_job())
    for path in ("events", "logs", "usage", "logs/worker-0"):
        api.get(f"/api/v1/jobs/digits-ab12cd/{path}")
    assert (api.door.asked_for_jobs, api.door.asked_for_glances) == (0, 1)
    for path in ("", "/instances"):
        assert api.get(f"/api/v1/jobs/digits-ab12cd{path}").status_code == 200
    assert (api.door.asked_for_jobs, api.door.asked_for_glances) == (2, 1)


def test_a_job_that_has_just_ended_can_be_removed_at_once(api: Api) -> None:
    api.door.put(adas_job())
    assert api.get("/api/v1/jobs/digits-ab12cd/events").status_code == 200
    api.door.becomes("digits-ab12cd", JobState.STOPPED)
    assert api.request("DELETE", "/api/v1/jobs/digits-ab12cd").status_code == 204


def test_stopping_tells_why_and_who(api: Api) -> None:
    api.door.put(adas_job())
    assert api.post("/api/v1/jobs/digits-ab12cd/stop", by="user").status_code == 200
    api.post("/api/v1/jobs/digits-ab12cd/stop", json={"force": True, "why": "wrong data"})
    assert api.door.calls == [
        ("stop", "digits-ab12cd", "stopped by ada over HTTP", False),
        ("stop", "digits-ab12cd", "wrong data", True),
    ]


def test_a_waiting_job_is_held_let_go_and_given_another_priority(api: Api) -> None:
    api.door.put(adas_job(JobState.QUEUED))
    path = "/api/v1/jobs/digits-ab12cd"
    for wish in ("hold", "release", "suspend", "resume"):
        assert api.post(f"{path}/{wish}", by="user").status_code == 200
    changed = api.request("PUT", f"{path}/priority", by="user", json={"priority": 2, "why": "urgent"})
    assert (changed.status_code, changed.json()["priority"]) == (200, 2)
    assert api.door.calls == [
        ("hold", "digits-ab12cd", "held by ada over HTTP"),
        ("release", "digits-ab12cd", "released by ada over HTTP"),
        ("suspend", "digits-ab12cd", "suspended by ada over HTTP"),
        ("resume", "digits-ab12cd", "resumed by ada over HTTP"),
        ("priority", "digits-ab12cd", 2, "urgent"),
    ]


def test_what_the_job_s_state_does_not_allow_is_a_conflict(api: Api) -> None:
    api.door.put(adas_job(JobState.RUNNING))
    path = "/api/v1/jobs/digits-ab12cd"
    for answer in (
        api.post(f"{path}/hold", by="user"),
        api.request("PUT", f"{path}/priority", by="user", json={"priority": 2}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:raycontrol:conflict")
        assert answer.json()["detail"] == "job digits-ab12cd is RUNNING"


def test_a_wrong_priority_is_told_in_the_words_that_a_spec_gets(api: Api) -> None:
    api.door.put(adas_job(JobState.QUEUED))
    path = "/api/v1/jobs/digits-ab12cd/priority"
    for sent, rule in (
        ({"priority": 10}, "must be at most 9"),
        ({"priority": "high"}, "must be a whole number"),
        ({}, "must be given"),
    ):
        answer = api.request("PUT", path, json=sent)
        assert answer.status_code == 422
        assert [(fault["field"], fault["rule"]) for fault in answer.json()["faults"]] == [("priority", rule)]
    assert api.door.calls == []


def test_only_an_ended_job_can_be_removed(api: Api) -> None:
    api.door.put(adas_job())
    refused = api.request("DELETE", "/api/v1/jobs/digits-ab12cd", by="user")
    assert (refused.status_code, api.door.calls) == (409, [])
    api.door.becomes("digits-ab12cd", JobState.SUCCEEDED)
    assert api.request("DELETE", "/api/v1/jobs/digits-ab12cd", by="user").status_code == 204
    assert api.get("/api/v1/jobs/digits-ab12cd").status_code == 404


def test_doubts_are_told_before_a_job_is_submitted(api: Api) -> None:
    for cpu, said in ((64, "no node has 64 CPUs"), (1, None)):
        spec = {**SPEC, "resources": {"cpu": cpu}}
        assert api.post("/api/v1/doubts", json={"spec": spec}).json() == {"doubts": said}


def test_a_package_comes_in_pieces(api: Api) -> None:
    path = f"/api/v1/packages/{DIGEST}"
    assert api.request("HEAD", path).status_code == 404
    assert api.request("PUT", f"{path}?offset=0", content=b"abc").json() == {"held": 3}
    assert api.request("PUT", f"{path}?offset=0", content=b"").json() == {"held": 3}
    assert api.request("PUT", f"{path}?offset=3&last=true", content=b"def").json() == {"held": 6}
    assert api.request("HEAD", path).status_code == 200
    assert [(entry.action, entry.target, entry.status) for entry in api.door.audited] == [
        ("upload", DIGEST, 200)
    ]


def test_a_user_has_so_many_unfinished_uploads_at_a_time(make_api: Callable[..., Api]) -> None:
    api = make_api(uploads_per_user=2)
    first, second, third = (f"/api/v1/packages/{digit * 64}" for digit in "abc")

    def put(path: str, content: bytes = b"x", by: str = "user") -> int:
        return api.request("PUT", path, by=by, content=content).status_code

    assert [put(first), put(second), put(third), put(second), put(third, by="other")] == [
        200,
        200,
        429,
        200,
        200,
    ]
    refused = api.request("PUT", third, by="user", content=b"x")
    assert 3500 < int(refused.headers["retry-after"]) <= 3600
    assert put(f"{first}?offset=1&last=true") == 200
    assert put(third) == 200
    assert put(first) == 429  # it is whole; another one of its name would be begun anew
    assert put(f"{third}?offset=0&last=true", b"damaged") == 200  # a longer one is there already
    assert put(f"{second}?last=true") == 200
    assert put(first) == 200


def test_an_upload_that_was_dropped_is_none_any_more(make_api: Callable[..., Api]) -> None:
    api = make_api(uploads_per_user=1)
    first, second = (f"/api/v1/packages/{digit * 64}" for digit in "ab")
    assert api.request("PUT", f"{first}?last=true", content=b"damaged").status_code == 422
    assert api.request("PUT", second, content=b"x").status_code == 200


def test_a_piece_of_which_nothing_is_kept_begins_no_upload(make_api: Callable[..., Api]) -> None:
    api = make_api(uploads_per_user=1, piece_bytes=10)
    first, second, third, fourth = (f"/api/v1/packages/{digit * 64}" for digit in "abcd")
    assert api.request("PUT", first, content=b"x" * 11).status_code == 413
    assert api.request("PUT", f"{second}?offset={20 << 20}", content=b"x").status_code == 413
    assert api.request("PUT", third, content=b"").json() == {"held": 0}
    assert api.request("PUT", fourth, content=b"x").status_code == 200
    assert api.request("PUT", fourth, content=b"x" * 11).status_code == 413
    assert api.request("PUT", first, content=b"x").status_code == 429


def test_an_upload_that_nothing_came_of_for_an_hour_is_forgotten() -> None:
    now = 0.0
    uploads = Uploads(1, clock=lambda: now)
    uploads.begin("ada", "a")
    now = 3599.0
    with pytest.raises(TooMany), uploads.piece("ada", "b"):
        pass
    now = 3600.0
    with uploads.piece("ada", "b"):
        pass


def test_pieces_that_come_together_are_counted_before_they_are_there() -> None:
    uploads = Uploads(1)
    with uploads.piece("ada", "a"):
        with uploads.piece("ada", "a"), uploads.piece("bob", "b"):
            pass
        with pytest.raises(TooMany) as refused:
            uploads.piece("ada", "b").__enter__()
    assert refused.value.headers == {"Retry-After": "1"}
    with uploads.piece("ada", "b"):
        pass


def test_a_damaged_package_is_told(api: Api) -> None:
    answer = api.request("PUT", f"/api/v1/packages/{DIGEST}?last=true", content=b"damaged")
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:raycontrol:package-error")


def test_a_lost_controller_is_told_as_such_and_looked_for_anew(api: Api) -> None:
    api.get("/api/v1/queue")
    api.door.error = lost()
    answer = api.get("/api/v1/queue")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["type"] == "urn:raycontrol:controller-unavailable"
    api.door.error = None
    assert api.get("/api/v1/queue").status_code == 200


def test_an_unknown_error_tells_nothing_of_the_inside(api: Api) -> None:
    api.get("/api/v1/queue")
    api.door.error = RuntimeError("the password is hunter2")
    answer = api.get("/api/v1/queue", headers={"X-Request-ID": "r-9"})
    assert answer.status_code == 500
    assert answer.json() == {
        "type": "urn:raycontrol:internal-error",
        "title": "Internal Server Error",
        "status": 500,
        "detail": "this should not happen; the server's log tells more under the request's id",
        "instance": "r-9",
    }


def test_an_unforeseen_error_of_the_controller_is_a_500_and_its_door_stays_open(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.get("/api/v1/queue")
    api.door.error = fault()
    answer = api.get("/api/v1/queue", headers={"X-Request-ID": "r-9"})
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:raycontrol:internal-error")
    assert "retry-after" not in answer.headers
    assert "hunter2" not in answer.text
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["request r-9 failed: a call to the head failed: RuntimeError: the password is hunter2"]
    assert "looking for it anew" not in caplog.text


def test_the_root_says_where_to_look(api: Api) -> None:
    for path in ("/", "/api/v1", "/api/v1/job"):
        answer = api.get(path)
        assert answer.status_code == 404
        assert answer.json()["detail"] == (
            "there is nothing at this path; /docs shows what can be asked, /openapi.json describes it for programs"
        )


def test_readiness_follows_controller_and_store(api: Api) -> None:
    assert api.get("/readyz", by=None).json() == {"ready": True}
    assert api.get("/healthz", by=None).json() == {"alive": True}


def test_a_store_that_takes_nothing_is_not_ready(api: Api) -> None:
    api.door.can_write = False
    answer = api.get("/readyz", by=None)
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "not ready: the controller's store takes no write",
    )


def test_a_controller_that_does_not_answer_is_not_ready(api: Api) -> None:
    api.door.error = lost()
    answer = api.get("/readyz", by=None)
    assert (answer.status_code, answer.json()["detail"]) == (503, "not ready: the controller does not answer")


def test_metrics_are_read_by_prometheus(api: Api) -> None:
    api.door.put(adas_job(JobState.RUNNING))
    api.get("/api/v1/jobs")
    usage = api.home / "jobs/digits-ab12cd/usage/0/worker-0.jsonl"
    usage.parent.mkdir(parents=True)
    gpu = {"index": 3, "uuid": "GPU-1", "utilisation_percent": 87.0, "memory_bytes": 1024}
    sample = {"at": time.time(), "cpu_percent": 1, "memory_bytes": 1, "read_bytes": 0, "written_bytes": 0}
    usage.write_text(json.dumps({**sample, "processes": 1, "gpus": [gpu]}) + "\n")
    lines = api.get("/metrics", by="viewer").text.splitlines()
    for line in (
        'raycontrol_jobs{state="RUNNING"} 1.0',
        'raycontrol_endings{reason="COMPLETED"} 2.0',
        'raycontrol_queue_wait_seconds_bucket{le="60"} 3.0',
        'raycontrol_queue_wait_seconds_bucket{le="+Inf"} 4.0',
        "raycontrol_queue_wait_seconds_sum 100.5",
        'raycontrol_gpu_utilisation_percent{gpu="3",node="host-b"} 87.0',
        'raycontrol_http_request_seconds_count{method="GET",route="/api/v1/jobs",status="200"} 1.0',
    ):
        assert line in lines


def test_tokens_are_made_shown_without_their_secret_and_revoked_at_once(api: Api) -> None:
    made = api.post("/api/v1/tokens", json={"name": "ci", "role": "user", "user": "ci", "ttl_s": 60})
    assert (made.status_code, made.json()["info"]["role"]) == (201, Role.USER)
    text = made.json()["token"]
    assert api.get("/api/v1/jobs", by=text).status_code == 200
    listed = api.get("/api/v1/tokens")
    assert text not in listed.text
    assert "ci" in [token["name"] for token in listed.json()]
    assert api.request("DELETE", "/api/v1/tokens/ci").status_code == 200
    assert api.get("/api/v1/jobs", by=text).status_code == 401
    assert api.request("DELETE", "/api/v1/tokens/none").status_code == 404


@pytest.mark.parametrize(
    ("given", "days"),
    [({}, 90), ({"ttl_s": 86400}, 1), ({"ttl_s": None}, None)],
    ids=["nothing", "a-day", "null"],
)
def test_a_token_lives_for_ninety_days_unless_something_else_is_said(
    api: Api, given: dict[str, Any], days: int | None
) -> None:
    made = api.post("/api/v1/tokens", json={"name": "ci", "role": "user", "user": "ci", **given}).json()
    lives_s = (made["info"]["expires_at"] or 0) - made["info"]["created_at"]
    assert made["info"]["expires_at"] is None if days is None else round(lives_s / 86400) == days


def test_the_audit_says_who_did_what_from_where_and_what_came_of_it(api: Api) -> None:
    api.door.put(adas_job())
    api.post("/api/v1/jobs", by="user", json={"spec": SPEC, "job_id": "a"}, headers={"X-Request-ID": "r1"})
    api.post("/api/v1/jobs", by="user", json={"spec": {}})
    api.post("/api/v1/jobs/digits-ab12cd/stop", by="other")
    api.post("/api/v1/jobs/digits-ab12cd/stop", by="viewer")
    api.get("/api/v1/jobs")
    found = [
        (e["user"], e["action"], e["target"], e["status"]) for e in api.get("/api/v1/audit").json()["entries"]
    ]
    assert found == [
        ("ada", "submit", "a", 201),
        ("ada", "submit", "", 422),
        ("bob", "stop", "digits-ab12cd", 404),
        ("vera", "stop", "digits-ab12cd", 403),
    ]
    first = api.door.audited[0]
    assert (first.origin, first.request_id, first.token) == ("10.0.0.9", "r1", "user")
    page = api.get("/api/v1/audit?limit=3").json()
    assert (len(page["entries"]), page["next"]) == (3, 3)


def test_refused_changes_of_one_token_do_not_fill_the_audit(make_api: Callable[..., Api]) -> None:
    api = make_api(refusals_burst=2, refusals_per_s=0.001)
    statuses = [api.post("/api/v1/jobs", by="user", json={"spec": {}}).status_code for _ in range(5)]
    api.post("/api/v1/jobs", by="user", json={"spec": SPEC})
    api.post("/api/v1/jobs", by="viewer", json={"spec": SPEC})
    assert statuses == [422] * 5
    assert [(entry.token, entry.status) for entry in api.door.audited] == [
        ("user", 422),
        ("user", 422),
        ("user", 201),
        ("viewer", 403),
    ]


def test_changes_of_one_token_that_fail_do_not_fill_the_audit(make_api: Callable[..., Api]) -> None:
    api = make_api(refusals_burst=2, refusals_per_s=0.001)
    assert api.get("/api/v1/jobs", by="user").status_code == 200
    api.door.error = StoreError("the disk is full")
    statuses = [api.post("/api/v1/jobs", by="user", json={"spec": SPEC}).status_code for _ in range(5)]
    assert statuses == [503] * 5
    assert [entry.status for entry in api.door.audited] == [503, 503]


def test_what_was_done_is_answered_and_logged_where_the_audit_takes_nothing(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.door.audit_error = StoreError("the disk is full")
    answer = api.post("/api/v1/jobs", by="user", json={"spec": SPEC}, headers={"X-Request-ID": "r1"})
    assert answer.status_code == 201
    (record,) = [record for record in caplog.records if "not in the audit" in record.getMessage()]
    assert "request_id='r1'" in record.getMessage()
    assert "action='submit'" in record.getMessage()


def test_what_the_audit_did_not_take_comes_into_it_later(make_api: Callable[..., Api]) -> None:
    api = make_api(audit_retry_s=0.01)
    api.door.audit_error = StoreError("the disk is full")
    for name in ("r1", "r2"):
        api.post("/api/v1/jobs", by="user", json={"spec": SPEC}, headers={"X-Request-ID": name})
    assert api.door.audited == []
    api.door.audit_error = None
    until(lambda: len(api.door.audited) == 2, "the entries")
    assert [entry.request_id for entry in api.door.audited] == ["r1", "r2"]


def test_an_audit_that_hangs_holds_no_answer_back(make_api: Callable[..., Api]) -> None:
    api = make_api(audit_wait_s=0.01, audit_retry_s=0.01)
    api.door.audit_pause = threading.Event()
    api.door.audit_error = lost()
    answers = [api.post("/api/v1/jobs", by="user", json={"spec": SPEC}) for _ in range(5)]
    assert ([answer.status_code for answer in answers], api.door.audit_pause.is_set()) == ([201] * 5, False)
    api.door.audit_error = None
    api.door.audit_pause.set()
    until(lambda: len(api.door.audited) == 5, "the entries")


def test_the_entry_of_a_request_that_is_cancelled_comes_into_the_audit(make_api: Callable[..., Api]) -> None:
    api = make_api(audit_retry_s=0.01)
    api.door.audit_pause = threading.Event()
    api.door.audit_error = lost()

    async def begun() -> asyncio.Task[httpx.Response]:
        rest = {"json": {"spec": SPEC}}
        return asyncio.ensure_future(api._request("POST", "/api/v1/jobs", api._login("user"), rest))

    async def cancelled(request: asyncio.Task[httpx.Response]) -> None:
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    request = api.run(begun())
    until(lambda: api.door.audits_begun == 1, "the entry on its way")
    api.run(cancelled(request))
    api.door.audit_pause.set()
    until(lambda: api.door.audits_begun > 1, "another try")
    api.door.audit_error = None
    until(lambda: len(api.door.audited) == 1, "the entry")


def test_a_job_shows_its_instances(api: Api) -> None:
    api.door.put(adas_job(reason=Reason.STARTED))
    names = [item["name"] for item in api.get("/api/v1/jobs/digits-ab12cd/instances").json()]
    assert names == ["master-0", "worker-0"]


# Arrays and dependencies.


def test_an_array_shows_its_members_and_a_member_is_a_job(api: Api) -> None:
    progress = ArrayInfo(indices="0-1", members=2, begun=1, living=1)
    api.door.put(job_info("sweep-1", user="ada", array=progress))
    api.door.put(job_info("sweep-1~0", user="ada", index=0, state=JobState.RUNNING))
    api.door.known_members = [
        MemberInfo(index=0, id="sweep-1~0", state=JobState.RUNNING, reason=Reason.STARTED),
        MemberInfo(index=1, state=JobState.QUEUED, reason=Reason.STARTED),
    ]
    assert api.get("/api/v1/jobs/sweep-1", by="user").json()["array"]["living"] == 1
    found = api.get("/api/v1/jobs/sweep-1/members", by="user").json()
    assert [(one["index"], one["id"], one["state"]) for one in found] == [
        (0, "sweep-1~0", "RUNNING"),
        (1, None, "QUEUED"),
    ]
    assert api.get("/api/v1/jobs/sweep-1~0").json()["index"] == 0
    assert api.get("/api/v1/jobs/sweep-1~0/members").status_code == 409
    assert api.request("DELETE", "/api/v1/jobs/sweep-1~0").status_code == 409
    assert api.get("/api/v1/jobs/sweep-1~x").status_code == 404


def test_a_job_can_wait_only_for_jobs_that_its_user_may_see(api: Api) -> None:
    api.door.put(adas_job())
    api.door.put(job_info("bobs-1", user="bob"))
    spec = {**SPEC, "after": {"ok": ["digits-ab12cd"], "any": ["bobs-1"], "failed": ["never-1"]}}
    refused = api.post("/api/v1/jobs", by="user", json={"spec": spec})
    assert refused.status_code == 422
    assert [(one["field"], one["rule"]) for one in refused.json()["faults"]] == [
        ("after.any", "there is no job 'bobs-1'"),
        ("after.failed", "there is no job 'never-1'"),
    ]
    spec["after"] = {"ok": ["digits-ab12cd"]}
    assert api.post("/api/v1/jobs", by="user", json={"spec": spec}).status_code == 201
