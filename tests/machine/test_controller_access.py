"""The controller's side of the HTTP interface: tokens, audit, idempotency keys, secrets of jobs, figures."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol.access import AuditEntry, Identity, Role
from raycontrol.errors import IdTaken, JobNotFound, KeyReused, UsageError
from raycontrol.retention import Limits
from raycontrol.status import JobState, Reason
from raycontrol.store import Store
from raycontrol.tokens import parsed
from tests.machine.fake_cluster import FakeCluster, Site, in_loop, submission
from tests.machine.test_controller import STAYS, finish, locked, site
from tests.unit.fake_gangs import nodes
from tests.unit.store_rows import note, row

pytestmark = pytest.mark.timeout(60)

HIDDEN = "hf_nobody-may-see-this"
DAY_S = 86_400.0


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def comes(here: Site, text: str) -> Identity | None:
    """Who comes with the text of a token, as the HTTP server reads it."""
    token = parsed(text)
    assert token is not None
    return known(here, token.id, token.digest)


def known(here: Site, token_id: str, digest: str) -> Identity | None:
    with Store(here.home, create=False) as store:
        return store.access.identity(token_id, digest, here.clock())


# Tokens.


@in_loop
async def test_a_token_opens_the_door_until_it_expires(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    here = Site(tmp_path, FakeCluster(()), clock=clock)
    info, text = await here.controller.porter.create_token("laptop", Role.USER, "ada", 60.0, by="root")
    assert (info.name, info.created_at, info.expires_at) == ("laptop", 1000.0, 1060.0)
    assert comes(here, text) == Identity(token="laptop", user="ada", role=Role.USER)
    clock.now = 1060.0
    assert comes(here, text) is None
    assert await here.controller.porter.tokens() == [info]
    await here.kill()


@in_loop
async def test_a_revoked_token_opens_nothing_and_can_be_revoked_again(tmp_path: Path) -> None:
    here = site(tmp_path)
    _, text = await here.controller.porter.create_token("laptop", Role.ADMIN, "ada", None, by="root")
    revoked = await here.controller.porter.revoke_token("laptop")
    assert comes(here, text) is None
    assert await here.controller.porter.revoke_token("laptop") == revoked
    with pytest.raises(UsageError, match="there is no token 'other'"):
        await here.controller.porter.revoke_token("other")
    await finish(here)


@in_loop
async def test_another_secret_or_id_opens_nothing(tmp_path: Path) -> None:
    here = site(tmp_path)
    _, text = await here.controller.porter.create_token("laptop", Role.USER, "ada", None, by="root")
    other = ("A" if text[-1] != "A" else "B", "abcdefgh")
    assert comes(here, text[:-1] + other[0]) is None
    assert comes(here, f"rct_{other[1]}_{text[13:]}") is None
    assert known(here, "abcdefgh", "0" * 64) is None
    assert known(here, "' OR 1=1 --", "") is None
    await finish(here)


@in_loop
async def test_tokens_outlive_their_controller_and_their_secrets_are_nowhere(tmp_path: Path) -> None:
    here = site(tmp_path)
    _, text = await here.controller.porter.create_token("laptop", Role.VIEWER, "ada", None, by="root")
    await here.restart()
    assert comes(here, text) == Identity(token="laptop", user="ada", role=Role.VIEWER)
    await here.kill()
    for file in tmp_path.glob("store.db*"):
        assert text[13:].encode() not in file.read_bytes()


@in_loop
async def test_what_cannot_be_a_token_is_refused(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.controller.porter.create_token("laptop", Role.USER, "ada", None, by="root")
    for name, user, ttl_s in (
        ("laptop", "ada", None),
        ("a b", "ada", 1.0),
        ("x", "", 1.0),
        ("x", "ada", 0.0),
    ):
        with pytest.raises(UsageError):
            await here.controller.porter.create_token(name, Role.USER, user, ttl_s, by="root")
    assert len(await here.controller.porter.tokens()) == 1
    await finish(here)


# Audit.


@in_loop
async def test_the_audit_is_kept_as_long_as_jobs_are(tmp_path: Path) -> None:
    here = site(tmp_path)
    now = here.cluster.now()
    for at in (now - 31 * DAY_S, now):
        entry = AuditEntry(
            at=at,
            token="laptop",
            user="ada",
            role=Role.USER,
            origin="10.0.0.9",
            action="submit",
            target="digits-1",
            status=201,
            request_id="5f0c",
        )
        await here.controller.porter.audit(entry)
    assert [found.seq for found in await here.controller.porter.audit_log(0, 10)] == [1, 2]
    await here.kill()
    here.controller = here._new()
    here.controller._caretaker._limits = lambda: Limits(keep_days=30)
    await here.controller.started()
    await asyncio.wait_for(_until_forgotten(here), 10)
    assert [found.seq for found in await here.controller.porter.audit_log(0, 10)] == [2]
    await finish(here)


async def _until_forgotten(here: Site) -> None:
    while len(await here.controller.porter.audit_log(0, 10)) > 1:
        await asyncio.sleep(0.02)


# Idempotency keys.


@in_loop
async def test_the_same_key_again_returns_the_job_as_it_is(tmp_path: Path) -> None:
    here = site(tmp_path)
    first = await here.submit("digits-1", key="k1", fingerprint="print")
    again = await here.submit("digits-2", key="k1", fingerprint="print")
    assert (again.id, again.submitted_at) == ("digits-1", first.submitted_at)
    await here.ends("digits-1")
    await here.restart()
    assert (await here.submit("digits-3", key="k1", fingerprint="print")).state is JobState.SUCCEEDED
    assert [info.id for info in await here.controller.jobs(None, None, None)] == ["digits-1"]
    await finish(here)


@in_loop
async def test_a_key_for_another_request_is_refused_and_submits_nothing(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", key="k1", fingerprint="print")
    with pytest.raises(KeyReused, match="idempotency key 'k1' was used for another request"):
        await here.submit("digits-2", key="k1", fingerprint="other")
    assert [info.id for info in await here.controller.jobs(None, None, None)] == ["digits-1"]
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_a_key_that_comes_many_times_at_once_submits_once(tmp_path: Path) -> None:
    here = site(tmp_path)
    jobs = await asyncio.gather(*(here.submit(f"digits-{n}", key="k1", fingerprint="p") for n in range(5)))
    assert {info.id for info in jobs} == {"digits-0"}
    await here.ends("digits-0")
    await finish(here)


@in_loop
async def test_a_key_goes_with_its_job(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", key="k1", fingerprint="print")
    await here.ends("digits-1")
    await here.controller.prune(["digits-1"])
    assert (await here.submit("digits-2", key="k1", fingerprint="other")).id == "digits-2"
    await here.ends("digits-2")
    await finish(here)


@in_loop
async def test_the_id_of_another_users_job_is_refused_and_tells_nothing_of_it(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    with pytest.raises(IdTaken, match="job id 'digits-1' is taken; choose another"):
        await here.controller.submit(replace(submission("digits-1"), user="bob"))
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_of_jobs_that_come_at_once_one_that_is_refused_does_not_harm_the_others(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("gone-1")
    await here.ends("gone-1")
    await here.controller.prune(["gone-1"])
    found = await asyncio.gather(
        *(here.submit(job_id) for job_id in ("a-1", "gone-1", "b-1", "b-1", "c-1")),
        return_exceptions=True,
    )
    assert isinstance(found.pop(1), IdTaken)
    assert [one.id for one in found if not isinstance(one, BaseException)] == ["a-1", "b-1", "b-1", "c-1"]
    for job_id in ("a-1", "b-1", "c-1"):
        await here.ends(job_id)
    await finish(here)


@in_loop
async def test_the_id_of_a_removed_job_is_refused_for_ever(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    await here.ends("digits-1")
    await here.controller.prune(["digits-1"])
    await here.restart()
    with pytest.raises(
        IdTaken, match="job id 'digits-1' was used by a job that has been removed; choose another"
    ):
        await here.submit("digits-1")
    assert (await here.submit("digits-2")).id == "digits-2"
    await here.ends("digits-2")
    await finish(here)


@in_loop
async def test_the_first_event_names_the_request(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", request_id="5f0c8a")
    await here.submit("digits-2")
    messages = [(await here.story(job_id))[0].message for job_id in ("digits-1", "digits-2")]
    assert messages == ["submitted by ada (request 5f0c8a)", "submitted by ada"]
    await here.ends("digits-1")
    await here.ends("digits-2")
    await finish(here)


# Questions about jobs.


@in_loop
async def test_jobs_are_listed_by_labels_text_and_page(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    for number, team in enumerate(("vision", "speech", "vision")):
        await here.submit(f"digits-{number}", nodes=3, labels={"team": team})
    ask = here.controller.jobs
    vision = await ask(None, None, None, labels={"team": "vision"})
    assert [info.id for info in vision] == ["digits-2", "digits-0"]
    assert [info.id for info in await ask(None, None, None, text="ITS-1")] == ["digits-1"]
    before = (vision[0].submitted_at, vision[0].id)
    assert [info.id for info in await ask(None, None, 1, before=before)] == ["digits-1"]
    await here.kill()


# Secrets of jobs.


def seen(home: Path) -> list[str]:
    """Where in the store the hidden value stands."""
    with sqlite3.connect(home / "store.db") as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        return [
            table
            for table in tables
            if any(HIDDEN in str(row) for row in connection.execute(f"SELECT * FROM {table}"))
        ]


@in_loop
async def test_secrets_reach_every_instance_and_nothing_else(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    asked = submission("digits-1", secret_env={"HF_TOKEN": HIDDEN}, env={"LR": "0.1"})
    submitted = await here.controller.submit(asked)
    running = await here.reaches("digits-1", JobState.RUNNING)
    orders = here.cluster.orders
    assert [(order.stage, order.secret_env) for order in orders] == [
        (0, {"HF_TOKEN": HIDDEN}),
        (0, {"HF_TOKEN": HIDDEN}),
        (1, {}),
        (1, {}),
    ]
    assert all("HF_TOKEN" not in order.environment and order.environment["LR"] == "0.1" for order in orders)
    story = await here.story("digits-1")
    shown = [asked, asked.spec.model_dump(mode="json"), submitted, running, *story, *orders]
    assert [thing for thing in shown if HIDDEN in repr(thing)] == []
    assert HIDDEN not in repr(here.controller._ledger.jobs["digits-1"])
    assert "HF_TOKEN" in here.controller._ledger.jobs["digits-1"].spec.secret_env
    assert seen(tmp_path) == ["secrets"]
    await here.controller.stop("digits-1", "enough")
    await here.ends("digits-1")
    assert seen(tmp_path) == []
    assert here.controller._ledger._secrets == {}
    await finish(here)


@in_loop
async def test_a_controller_that_starts_again_delivers_secrets_from_its_store(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1", nodes=3, secret_env={"HF_TOKEN": HIDDEN})
    await here.restart()
    assert here.cluster.orders == []
    here.cluster.rooms.update({room.id: room for room in nodes("a", "b", "c", cpu=1)})
    await here.reaches("digits-1", JobState.RUNNING)
    delivered = [order.secret_env for order in here.cluster.orders if order.stage == 0]
    assert delivered == [{"HF_TOKEN": HIDDEN}] * 3
    await here.controller.stop("digits-1", "enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_secrets_that_nobody_gave_are_refused_before_anything_is_stored(tmp_path: Path) -> None:
    here = site(tmp_path)
    with pytest.raises(UsageError, match="secret_env: HF_TOKEN, WANDB are without a value"):
        await here.submit("digits-1", secret_env={"HF_TOKEN": None, "WANDB": None, "OTHER": "x"})
    assert await here.controller.jobs(None, None, None) == []
    await finish(here)


def test_nothing_secret_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> str:
        here = site(tmp_path)
        here.cluster.trouble["stage"] = [RuntimeError("the network is down")]
        await here.submit("digits-1", secret_env={"HF_TOKEN": HIDDEN})
        _, text = await here.controller.porter.create_token("laptop", Role.USER, "ada", None, by="root")
        comes(here, text)
        await here.ends("digits-1")
        await finish(here)
        return text

    with caplog.at_level(logging.DEBUG):
        text = asyncio.run(story())
    assert "the network is down" in caplog.text
    assert HIDDEN not in caplog.text
    assert text[13:] not in caplog.text


# How the cluster fares.


@in_loop
async def test_figures_tell_of_waiting_running_and_ended_jobs(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    await here.ends("digits-1")
    await here.submit("digits-2", nodes=3)
    found = await here.controller.porter.metrics()
    assert {state.value: count for state, count in found.jobs.items() if count} == {
        "QUEUED": 1,
        "SUCCEEDED": 1,
    }
    assert (found.attempts, found.endings) == (1, {Reason.COMPLETED: 1})
    assert (found.queue_wait_s.count, found.launch_s.count) == (1, 1)
    assert 0 < found.launch_s.sum_s < 10
    await here.kill()


@in_loop
async def test_a_store_that_another_program_keeps_locked_is_not_writable(tmp_path: Path) -> None:
    here = site(tmp_path)
    assert await here.controller.porter.writable() is True
    with locked(tmp_path):
        assert await here.controller.porter.writable() is False
    assert await here.controller.porter.writable() is True
    await finish(here)


@in_loop
async def test_the_queue_has_the_waiting_jobs_of_this_cluster_in_their_order(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add(row("theirs-1", cluster="west"), note())
    here = site(tmp_path)
    for job_id in ("b-1", "a-1"):
        await here.submit(job_id, nodes=9)
        await here.shows(job_id, lambda info: "infeasible now" in str(info.pending))
    assert [(job.position, job.id) for job in await here.controller.queue()] == [(None, "b-1"), (None, "a-1")]
    assert await here.controller.running() == []
    assert (await here.controller.glance("a-1")).state is JobState.QUEUED
    for job_id in ("b-1", "a-1"):
        await here.controller.stop(job_id, "enough")
        await here.ends(job_id)
    assert await here.controller.queue() == []
    assert (await here.controller.glance("a-1")).state is JobState.STOPPED
    with pytest.raises(JobNotFound):
        await here.controller.glance("never-1")
    await finish(here)


@in_loop
async def test_packages_that_no_job_uses_are_cared_for_without_a_job_to_remove(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.controller.started()
    deadline = time.monotonic() + 10
    while not here.cluster.packages_kept and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert (here.cluster.packages_kept, here.cluster.removed_stored) == ([set()], [])
    await finish(here)
