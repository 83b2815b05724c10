"""What many ask for is asked for once, is never older than it may be, and is new for who has changed something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from raycontrol.api.answers import Answers
from raycontrol.api.calls import Calls
from raycontrol.api.limits import Limits
from raycontrol.errors import ControllerUnavailable
from raycontrol.readers import ServerDoor
from raycontrol.status import JobState
from tests.api.fakes import Api, FakeDoor, adas_job, lost, until, write_log
from tests.fake_client import job_info

LIST = "/api/v1/jobs"


class Oracle:
    """Answers what it is asked with the number of the question; while ``may`` is not set it thinks."""

    def __init__(self) -> None:
        self.asked = 0
        self.now = 100.0
        self.error: Exception | None = None
        self.may = threading.Event()
        self.may.set()

    def question(self, door: ServerDoor, about: str) -> str:
        self.asked += 1
        told = f"{about} {self.asked}"
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        return told

    def clock(self) -> float:
        return self.now


def ask(
    oracle: Oracle, work: Callable[[Answers[str, str]], Coroutine[Any, Any, None]], most: int = 10
) -> None:
    """Do ``work`` with answers that are good for two seconds."""

    async def run() -> None:
        calls = Calls(FakeDoor, replace(Limits(), calls=4))
        await work(
            Answers(
                calls,
                lambda about: calls.ask(lambda door: oracle.question(door, about)),
                2.0,
                most,
                oracle.clock,
            )
        )
        calls.close()

    asyncio.run(run())


async def asked(oracle: Oracle, times: int) -> None:
    await asyncio.to_thread(until, lambda: oracle.asked == times, f"question {times}")


def test_all_who_ask_meanwhile_share_one_question() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        assert set(await asyncio.gather(*(answers.get("who") for _ in range(20)))) == {"who 1"}
        assert await answers.get("who") == "who 1"
        assert await answers.get("what") == "what 2"

    ask(oracle, work)


def test_an_answer_is_renewed_before_it_is_too_old_and_nobody_waits_for_that() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        await answers.get("who")
        oracle.now = 100.9
        assert await answers.get("who") == "who 1"
        oracle.now = 101.0
        oracle.may.clear()
        assert [await answers.get("who") for _ in range(3)] == ["who 1"] * 3
        await asked(oracle, 2)
        oracle.now = 101.9
        assert await answers.get("who") == "who 1"
        oracle.now = 102.0
        late = asyncio.ensure_future(answers.get("who"))
        oracle.may.set()
        assert await late == "who 2"

    ask(oracle, work)
    assert oracle.asked == 2


def test_an_answer_is_as_old_as_its_question() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        oracle.may.clear()
        first = asyncio.ensure_future(answers.get("who"))
        await asked(oracle, 1)
        oracle.now = 102.0
        second = asyncio.ensure_future(answers.get("who"))
        await asked(oracle, 2)
        oracle.may.set()
        assert await asyncio.gather(first, second) == ["who 1", "who 2"]
        assert await answers.get("who") == "who 2"

    ask(oracle, work)


def test_nothing_that_was_asked_before_a_change_is_told_after_it() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        await answers.get("known")
        oracle.may.clear()
        before = asyncio.ensure_future(answers.get("under way"))
        await asked(oracle, 2)
        answers.forget()
        after = [asyncio.ensure_future(answers.get(about)) for about in ("known", "under way")]
        await asked(oracle, 4)
        oracle.may.set()
        assert await before == "under way 2"
        assert {(await answer).split(" ")[-1] for answer in after} == {"3", "4"}

    ask(oracle, work)


def test_a_failure_is_told_to_all_who_wait_and_not_kept() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        oracle.error = lost()
        failed = await asyncio.gather(*(answers.get("who") for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [ControllerUnavailable] * 3
        assert oracle.asked == 1
        oracle.error = None
        assert await answers.get("who") == "who 2"

    ask(oracle, work)


def test_only_so_many_answers_are_kept_and_none_that_is_too_old() -> None:
    oracle = Oracle()

    async def work(answers: Answers[str, str]) -> None:
        for number in range(5):
            await answers.get(f"{number}")
        assert list(answers._answered) == ["2", "3", "4"]
        oracle.now = 102.0
        await answers.get("5")
        assert list(answers._answered) == ["5"]
        assert not answers._asking

    ask(oracle, work, most=3)


# Lists.


def ids(api: Api, query: str = "", by: str = "viewer") -> list[str]:
    return [job["id"] for job in api.get(f"{LIST}{query}", by=by).json()["jobs"]]


def test_those_who_poll_the_same_list_ask_for_it_once(api: Api) -> None:
    api.door.put(adas_job())
    for by in ("viewer", "operator", "admin"):
        assert ids(api, by=by) == ["digits-ab12cd"]
    assert api.door.asked_for_lists == 1
    for number, query in enumerate(
        ("?limit=1", "?state=RUNNING", "?user=ada", "?label=a=b", "?text=x"), start=2
    ):
        ids(api, query)
        ids(api, query)
        assert api.door.asked_for_lists == number
    assert ids(api, by="other") == []
    assert ids(api, by="user") == ["digits-ab12cd"]


def test_who_has_changed_something_sees_it_in_his_next_list(api: Api) -> None:
    assert ids(api) == []
    api.post(LIST, json={"spec": {"command": "true"}, "job_id": "new-1"}, by="user")
    assert ids(api) == ["new-1"]
    api.door.put(job_info("other-1", submitted_at=1.0))
    api.post(f"{LIST}/new-1/stop", by="user")
    assert ids(api) == ["new-1", "other-1"]
    api.door.becomes("new-1", JobState.STOPPED)
    api.request("DELETE", f"{LIST}/new-1", by="user")
    assert ids(api) == ["other-1"]
    assert api.get(f"{LIST}/new-1/events", by="user").status_code == 404


def test_a_change_of_which_nobody_can_say_that_it_was_made_is_looked_for(api: Api) -> None:
    assert ids(api, by="operator") == []
    api.door.put(adas_job())
    api.door.error = lost()
    assert api.post(LIST, json={"spec": {"command": "true"}}, by="operator").status_code == 503
    api.door.error = None
    assert ids(api, by="operator") == ["digits-ab12cd"]


def test_the_bytes_of_jobs_are_added_up_once_for_all_who_ask(api: Api) -> None:
    job = api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"12345")

    def sizes(by: str) -> dict[str, int]:
        return dict(api.get("/api/v1/sizes", by=by).json())

    assert sizes("viewer") == {job.id: 5}
    write_log(api.home, b"67890")
    assert [sizes(by) for by in ("viewer", "admin", "user", "other")] == [{job.id: 5}] * 3 + [{}]
    assert api.request("DELETE", f"{LIST}/{job.id}").status_code == 204
    assert sizes("viewer") == {job.id: 10}


def test_what_changes_elsewhere_is_seen_a_moment_later(make_api: Callable[..., Api]) -> None:
    api = make_api(glance_s=0.05, burst=100_000)
    assert ids(api) == []
    api.door.put(adas_job())
    until(lambda: ids(api) == ["digits-ab12cd"], "the job in the list")


# Shares.


def test_one_token_s_calls_leave_room_for_the_others(make_api: Callable[..., Api]) -> None:
    api = make_api(calls_per_token=2)
    api.door.nodes_pause = threading.Event()
    with api.live("/api/v1/nodes", by="operator") as first, api.live("/api/v1/nodes", by="operator"):
        until(lambda: api.door.asked_for_nodes == 2, "two calls under way")
        refused = api.get("/api/v1/queue", by="operator")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["type"] == "urn:raycontrol:too-many"
        assert refused.json()["detail"] == (
            "token 'operator' has 2 requests that wait for the cluster at a time; wait for one to end"
        )
        assert api.get("/api/v1/queue", by="other").status_code == 200
        api.door.nodes_pause.set()
        until(lambda: first.over, "the first answer")
    assert api.get("/api/v1/queue", by="operator").status_code == 200


def test_one_token_s_calls_under_way_leave_threads_for_the_others(make_api: Callable[..., Api]) -> None:
    api = make_api(calls=4)
    api.door.nodes_pause = threading.Event()
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(api.live("/api/v1/nodes", by="operator"))
        until(lambda: api.door.asked_for_nodes == 2, "as many calls as a token may have under way")
        assert api.get("/api/v1/queue", by="other").status_code == 200
        assert api.door.asked_for_nodes == 2
        api.door.nodes_pause.set()
        until(lambda: api.door.asked_for_nodes == 6, "the calls that waited for their turn")


def test_a_call_that_nobody_waits_for_any_more_keeps_its_thread_and_its_token_s_turn(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(calls=4, calls_per_token=3, answer_s=0.2)
    api.door.nodes_pause = threading.Event()

    async def given_up() -> list[int]:
        asking = (api._request("GET", "/api/v1/nodes", api._login("operator"), {}) for _ in range(3))
        return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert api.run(given_up()) == [503] * 3
    assert sorted(api.run(given_up())) == [429, 429, 503]
    assert api.get("/api/v1/queue", by="other").status_code == 200
    assert api.door.asked_for_nodes == 2
    api.door.nodes_pause.set()
    until(lambda: api.get("/api/v1/nodes", by="operator").status_code == 200, "its own turn again")


def test_one_token_s_followers_leave_room_for_the_others(make_api: Callable[..., Api]) -> None:
    api = make_api(followers_per_token=1)
    api.door.put(adas_job())
    follow = "/api/v1/jobs/digits-ab12cd/events/stream"
    with api.live(follow) as first:
        until(lambda: first.status == 200, "the first follower")
        refused = api.get(follow)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["type"] == "urn:raycontrol:too-many"
        with api.live(follow, by="viewer") as other:
            until(lambda: other.status == 200, "another token's follower")
    with api.live(follow) as again:
        until(lambda: again.status == 200, "a follower in its place")


def test_what_many_wait_for_is_one_call_of_the_first_of_them(make_api: Callable[..., Api]) -> None:
    api = make_api(calls_per_token=1)
    api.door.put(adas_job())

    async def all_at_once() -> list[int]:
        asking = (api._request("GET", LIST, api._login("viewer"), {}) for _ in range(5))
        return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert api.run(all_at_once()) == [200] * 5
