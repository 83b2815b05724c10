"""Tokens, audit, keys and secrets in the store; jobs found by labels and text; figures about all jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from raycontrol.access import AuditEntry, Identity, Role, TokenInfo
from raycontrol.accessrows import Belongings, Key, UsedKey
from raycontrol.errors import StoreError, UsageError
from raycontrol.status import Histogram, JobState, Reason
from raycontrol.store import Change, Store
from tests.unit.store_rows import note, row


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home") as store:
        yield store


def info(name: str = "laptop", **values: object) -> TokenInfo:
    facts = {"name": name, "role": Role.USER, "user": "ada", "created_at": 1000.0, "expires_at": 2000.0}
    return TokenInfo.model_validate({**facts, **values})


def entry(target: str = "digits-1", **values: object) -> AuditEntry:
    facts = {"at": 1000.0, "token": "laptop", "user": "ada", "role": Role.USER, "origin": "10.0.0.9"}
    facts |= {"action": "submit", "target": target, "status": 201, "request_id": "5f0c"}
    return AuditEntry.model_validate({**facts, **values})


def secrets_on_disk(store: Store) -> list[tuple[str, str, str]]:
    with sqlite3.connect(store.home / "store.db") as connection:
        return connection.execute("SELECT job_id, name, value FROM secrets").fetchall()


def bytes_on_disk(store: Store) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(store.home.glob("store.db*")))


def end(store: Store, job_id: str, state: JobState = JobState.SUCCEEDED, **values: object) -> None:
    store.save([Change(row(job_id, state=state), (note("ended", state=state, **values),))])


# Tokens.


def test_a_token_is_kept_with_the_hash_of_its_secret(store: Store) -> None:
    store.access.add_token("k3x9abcd", "ab" * 32, info(), by="root")
    kept = store.access.token("k3x9abcd")
    assert kept is not None
    assert (kept.info, kept.digest) == (info(), "ab" * 32)
    assert "abab" not in repr(kept)
    assert store.access.token("zzzzzzzz") is None
    assert store.access.tokens() == [info()]


def test_a_token_tells_who_comes_until_it_expires_or_is_revoked(store: Store) -> None:
    store.access.add_token("k3x9abcd", "ab" * 32, info(), by="root")
    kept = store.access.token("k3x9abcd")
    assert kept is not None
    assert kept.identity(1999.9) == Identity(token="laptop", user="ada", role=Role.USER)
    assert kept.identity(2000.0) is None
    store.access.revoke_token("laptop", now=1500.0)
    revoked = store.access.token("k3x9abcd")
    assert revoked is not None
    assert revoked.identity(1500.0) is None


def test_a_name_is_free_again_when_its_token_has_ended(store: Store) -> None:
    store.access.add_token("aaaaaaaa", "a" * 64, info(), by="root")
    with pytest.raises(UsageError, match=r"there is a token 'laptop'; .*raycontrol token revoke laptop"):
        store.access.add_token("bbbbbbbb", "b" * 64, info(created_at=1999.0), by="root")
    store.access.add_token("cccccccc", "c" * 64, info(created_at=2000.0, expires_at=None), by="root")
    store.access.revoke_token("laptop", now=2100.0)
    store.access.add_token("dddddddd", "d" * 64, info(created_at=2200.0, expires_at=None), by="root")
    assert [(token.created_at, token.revoked_at) for token in store.access.tokens()] == [
        (1000.0, None),
        (2000.0, 2100.0),
        (2200.0, None),
    ]


def test_a_revoked_token_stays_revoked_and_an_unknown_one_is_a_usage_error(store: Store) -> None:
    store.access.add_token("aaaaaaaa", "a" * 64, info(), by="root")
    assert store.access.revoke_token("laptop", now=1100.0).revoked_at == 1100.0
    assert store.access.revoke_token("laptop", now=1200.0).revoked_at == 1100.0
    with pytest.raises(UsageError, match="there is no token 'other'"):
        store.access.revoke_token("other", now=1100.0)


def test_tokens_that_ended_long_ago_are_forgotten(store: Store) -> None:
    store.access.add_token("aaaaaaaa", "a" * 64, info("expired", expires_at=1500.0), by="root")
    store.access.add_token("bbbbbbbb", "b" * 64, info("revoked", expires_at=None), by="root")
    store.access.add_token("cccccccc", "c" * 64, info("living", expires_at=None), by="root")
    store.access.add_token("dddddddd", "d" * 64, info("recent", expires_at=2000.0), by="root")
    store.access.revoke_token("revoked", now=1600.0)
    store.access.forget_tokens(before=2000.0)
    assert [token.name for token in store.access.tokens()] == ["living", "recent"]


# Audit.


def test_the_audit_is_read_in_pages_and_never_changes(store: Store) -> None:
    assert [store.access.add_audit(entry(f"digits-{number}")) for number in range(3)] == [1, 2, 3]
    first = store.access.audit_log(0, 2)
    assert [(found.seq, found.target) for found in first] == [(1, "digits-0"), (2, "digits-1")]
    assert store.access.audit_log(2, 2) == [entry("digits-2", seq=3)]
    connection = sqlite3.connect(store.home / "store.db")
    with pytest.raises(sqlite3.IntegrityError, match="never changes"):
        connection.execute("UPDATE audit SET user = 'bob'")
    connection.close()


def test_old_entries_are_forgotten_and_their_numbers_not_used_again(store: Store) -> None:
    store.access.add_audit(entry(at=1000.0))
    store.access.add_audit(entry(at=2000.0))
    store.access.forget_audit(before=2000.0)
    assert [found.seq for found in store.access.audit_log(0, 10)] == [2]
    store.access.forget_audit(before=3000.0)
    assert store.access.add_audit(entry()) == 3


# What belongs to jobs.


def test_a_key_is_stored_with_its_job_and_goes_with_it(store: Store) -> None:
    store.add(row(cluster="east"), note(), belongings=Belongings(Key("ada", "k1", "print")))
    assert store.access.used_key("east", "ada", "k1") == UsedKey("print", "digits-1")
    assert store.access.used_key("east", "bob", "k1") is None
    assert store.access.used_key("west", "ada", "k1") is None
    store.save([Change(row(cluster="east", state=JobState.FAILED))])
    assert store.access.used_key("east", "ada", "k1") == UsedKey("print", "digits-1")
    store.remove(["digits-1"])
    assert store.access.used_key("east", "ada", "k1") is None


def test_a_job_whose_key_is_taken_is_not_stored_at_all(store: Store) -> None:
    store.add(row("a"), note(), belongings=Belongings(Key("ada", "k1")))
    with pytest.raises(StoreError):
        store.add(row("b"), note(), belongings=Belongings(Key("ada", "k1"), {"HF_TOKEN": "hidden"}))
    assert store.job("b") is None
    assert store.events("b") == []
    assert secrets_on_disk(store) == []


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED])
def test_secrets_are_gone_when_their_job_has_ended(store: Store, state: JobState) -> None:
    for job_id in ("a", "b"):
        store.add(row(job_id), note(), belongings=Belongings(secrets={"HF_TOKEN": f"hidden of {job_id}"}))
    assert store.access.secrets_of(["a", "never-there"]) == {"a": {"HF_TOKEN": "hidden of a"}}
    store.save([Change(row("a", state=JobState.RUNNING))])
    assert store.access.secrets_of(["a"]) == {"a": {"HF_TOKEN": "hidden of a"}}
    end(store, "a", state)
    assert secrets_on_disk(store) == [("b", "HF_TOKEN", "hidden of b")]


def test_what_was_a_secret_is_overwritten_in_the_file(store: Store) -> None:
    store.add(row(), note(), belongings=Belongings(secrets={"HF_TOKEN": "hf_do-not-keep"}))
    assert b"hf_do-not-keep" in bytes_on_disk(store)
    end(store, "digits-1")
    assert b"hf_do-not-keep" not in bytes_on_disk(store)


def test_what_was_a_secret_of_a_removed_job_is_overwritten_too(store: Store) -> None:
    store.add(row(), note(), belongings=Belongings(secrets={"HF_TOKEN": "hf_do-not-keep"}))
    store.remove(["digits-1"])
    assert b"hf_do-not-keep" not in bytes_on_disk(store)


def test_a_reader_does_not_keep_secrets_alive_beyond_the_next_write(store: Store) -> None:
    store.add(row(), note(), belongings=Belongings(secrets={"HF_TOKEN": "hf_do-not-keep"}))
    with closing(sqlite3.connect(store.home / "store.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT id FROM jobs").fetchall()
        end(store, "digits-1")
        assert b"hf_do-not-keep" in bytes_on_disk(store)
        reader.execute("COMMIT")
        store.access.add_audit(entry())
    assert b"hf_do-not-keep" not in bytes_on_disk(store)


def test_a_store_that_is_opened_anew_overwrites_what_its_last_owner_could_not(store: Store) -> None:
    store.add(row(), note(), belongings=Belongings(secrets={"HF_TOKEN": "hf_do-not-keep"}))
    with closing(sqlite3.connect(store.home / "store.db", isolation_level=None)) as killed:
        killed.execute("PRAGMA secure_delete=ON")
        killed.execute("UPDATE jobs SET state = 'FAILED'")
        assert b"hf_do-not-keep" in bytes_on_disk(store)
        with Store(store.home) as heir:
            heir.access.add_audit(entry())
        assert b"hf_do-not-keep" not in bytes_on_disk(store)


def test_secrets_are_in_no_repr() -> None:
    assert "hidden" not in repr(Belongings(secrets={"HF_TOKEN": "hidden"}))


# Jobs found.


def test_jobs_are_found_by_labels(store: Store) -> None:
    store.add(row("a", labels='{"team": "vision", "a.b/c": "1"}'), note())
    store.add(row("b", labels='{"team": "speech"}'), note())
    store.add(row("c"), note())

    def found(**labels: str) -> list[str]:
        return [job.id for job in store.jobs(labels=labels)]

    assert found(team="vision") == ["a"]
    assert found(**{"team": "vision", "a.b/c": "1"}) == ["a"]
    assert found(**{"team": "vision", "a.b/c": "2"}) == []
    assert found(**{"x\"]'; DROP TABLE jobs --": "1"}) == []
    assert found() == ["c", "b", "a"]


def test_jobs_are_found_by_a_part_of_their_id_or_name(store: Store) -> None:
    store.add(row("digits-1", name="Digits"), note())
    store.add(row("x-2", name="big%words"), note())
    assert [job.id for job in store.jobs(text="IGIT")] == ["digits-1"]
    assert [job.id for job in store.jobs(text="-2")] == ["x-2"]
    assert [job.id for job in store.jobs(text="%")] == ["x-2"]
    assert [job.id for job in store.jobs(text="_")] == []
    assert [job.id for job in store.jobs(text="")] == ["x-2", "digits-1"]


def test_a_page_goes_on_after_the_last_job_of_the_one_before(store: Store) -> None:
    for number in range(5):
        store.add(row(f"job-{number}", labels='{"team": "vision"}' if number % 2 == 0 else "{}"), note())
    page = store.jobs(labels={"team": "vision"}, limit=2)
    assert [job.id for job in page] == ["job-4", "job-2"]
    before = (page[-1].submitted_at, page[-1].id)
    assert [job.id for job in store.jobs(labels={"team": "vision"}, limit=2, before=before)] == ["job-0"]


# Figures.


def test_an_empty_store_has_figures_too(store: Store) -> None:
    found = store.metrics("10.0.0.1:6379")
    assert found.jobs == dict.fromkeys(JobState, 0)
    assert (found.attempts, found.endings) == (0, {})
    assert (found.launch_s.count, found.launch_s.sum_s) == (0, 0.0)
    assert {count for _, count in found.launch_s.buckets} == {0}


def test_figures_are_those_of_one_clusters_jobs(store: Store) -> None:
    store.add(row("waits"), note())
    for job_id, chosen_at, ran_at in (("quick", 1000.5, 1003.0), ("slow", 1200.0, 1212.0)):
        store.add(row(job_id), note())
        placed = note("reserving", at=chosen_at, kind="NodesChosen", state=JobState.PLACING)
        ran = note("running", at=ran_at, kind="StagePassed", state=JobState.RUNNING)
        store.save([Change(row(job_id, state=JobState.RUNNING), (placed, ran))])
    end(store, "quick", reason=Reason.COMPLETED)
    store.add(row("foreign", cluster="other"), note())
    found = store.metrics("10.0.0.1:6379")
    counted = {state.value: count for state, count in found.jobs.items() if count}
    assert counted == {"QUEUED": 1, "RUNNING": 1, "SUCCEEDED": 1}
    assert (found.attempts, found.endings) == (2, {Reason.COMPLETED: 1})
    assert (found.queue_wait_s.count, found.queue_wait_s.sum_s) == (2, 200.5)
    assert found.launch_s == Histogram(
        buckets=(
            (1.0, 0), (2.5, 1), (5.0, 1), (10.0, 1), (30.0, 2), (60.0, 2), (120.0, 2), (300.0, 2), (600.0, 2),
            (1800.0, 2), (3600.0, 2), (14400.0, 2), (86400.0, 2),
        ),
        count=2,
        sum_s=14.5,
    )  # fmt: skip


def test_an_attempt_that_was_placed_twice_is_one_and_its_launch_counts_from_the_last_time(
    store: Store,
) -> None:
    store.add(row("a"), note())
    told = [
        note("reserving", at=1010.0, kind="NodesChosen", state=JobState.PLACING),
        note("reserving", at=1020.0, kind="NodesChosen", state=JobState.PLACING),
        note("running", at=1023.0, kind="StagePassed", state=JobState.RUNNING),
    ]
    store.save([Change(row("a", state=JobState.RUNNING), tuple(told))])
    found = store.metrics("10.0.0.1:6379")
    assert (found.attempts, found.queue_wait_s.sum_s, found.launch_s.sum_s) == (1, 10.0, 3.0)


def test_figures_are_read_from_small_indexes_alone(store: Store) -> None:
    from raycontrol import metricrows

    for query in (metricrows._WAITS, metricrows._LAUNCHES, metricrows._ATTEMPTS, metricrows._ENDINGS):
        with sqlite3.connect(store.home / "store.db") as connection:
            steps = [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {query}", ("east",))]
        about_events = [step for step in steps if "events" in step]
        assert about_events, steps
        assert all("COVERING INDEX events_of_" in step for step in about_events), steps
