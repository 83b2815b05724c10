from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.errors import StoreError, StoreOwned
from raycontrol.status import JobState
from raycontrol.store import Change, Lease, LeaseRow, Store
from tests.unit.store_rows import note, python, row


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home") as store:
        yield store


def die(lease: Lease) -> None:
    """What the kernel does for a process that was killed: the lock goes, the row stays."""
    os.close(lease.handle)


def test_a_lease_is_a_row_and_a_lock_until_it_is_released(store: Store) -> None:
    lease = store.acquire("blue", "head", 77, now=1000.0)
    assert store.lease("blue") == LeaseRow("blue", "head", 77, lease.token, 1000.0, 1000.0, 30)
    assert store.controlled("blue")
    store.heartbeat(lease, now=1010.0)
    assert store.lease("blue") == LeaseRow("blue", "head", 77, lease.token, 1000.0, 1010.0, 30)
    store.release(lease)
    assert store.lease("blue") is None
    assert not store.controlled("blue")
    assert list((store.home / "locks").iterdir()) == [store.home / "locks" / "schema.lock"]


def test_a_second_controller_is_refused_and_told_the_holder(store: Store) -> None:
    store.acquire("blue", "head", 77, now=1000.0)
    for host in ("head", "other"):
        with pytest.raises(StoreOwned) as caught, Store(store.home) as second:
            second.acquire("blue", host, 78, now=1012.0)
        assert pickle.loads(pickle.dumps(caught.value)).holder == "pid 77 on head, last heard from 12 s ago"


def test_a_living_holder_keeps_its_lease_however_old_its_heartbeat(store: Store) -> None:
    store.acquire("blue", "head", 77, now=1000.0)
    with pytest.raises(StoreOwned):
        store.acquire("blue", "head", 78, now=9000.0)


def test_a_dead_holder_of_the_same_host_is_succeeded_at_once(store: Store) -> None:
    die(store.acquire("blue", "head", 77, now=1000.0))
    assert not store.controlled("blue")
    store.acquire("blue", "head", 78, now=1000.1)
    row = store.lease("blue")
    assert row is not None
    assert (row.pid, row.acquired_at) == (78, 1000.1)


def test_another_hosts_holder_is_succeeded_when_its_own_lease_has_run_out(store: Store) -> None:
    lease = store.acquire("blue", "head", 77, now=1000.0, lease_s=30)
    store.heartbeat(lease, now=1005.0)
    die(lease)
    with pytest.raises(StoreOwned, match="pid 77 on head, last heard from 30 s ago"):
        store.acquire("blue", "other", 78, now=1035.0, lease_s=1)
    assert not store.controlled("blue")  # the refused one holds nothing
    store.acquire("blue", "other", 78, now=1035.1)


def test_a_heartbeat_of_another_host_that_lies_ahead_is_no_sign_of_life(store: Store) -> None:
    """The clock there was an hour ahead, or the one here is behind."""
    die(store.acquire("blue", "head", 77, now=4600.0))
    with pytest.raises(StoreOwned):
        store.acquire("blue", "other", 78, now=4571.0)
    successor = store.acquire("blue", "other", 78, now=1000.0)
    assert successor.predecessor_at == 4600.0


def test_a_holder_that_lost_its_lease_can_do_nothing_more_with_it(store: Store) -> None:
    store.add(row(), note())
    lost = store.acquire("blue", "head", 77, now=1000.0)
    with Store(store.home) as second:
        second._database.lock_path("blue").unlink()  # another kernel does not see the lock
        successor = second.acquire("blue", "other", 78, now=1031.0)
        with pytest.raises(StoreOwned, match="pid 78 on other, which took over"):
            store.heartbeat(lost, now=1031.0)
        with pytest.raises(StoreOwned):
            store.save([Change(row(state=JobState.RUNNING))], lease=lost)
        with pytest.raises(StoreOwned):
            store.add(row("digits-2"), note(), lease=lost)
        store.release(lost)
        assert store.controlled("blue")
        second.heartbeat(successor, now=1032.0)
        assert second.save([Change(row(state=JobState.PLACING), (note(),))], lease=successor)[0].seq == 2
    assert store.jobs() == [row(state=JobState.PLACING)]


def test_a_lease_whose_row_is_gone_is_lost(store: Store) -> None:
    lease = store.acquire("blue", "head", 77, now=1000.0)
    store.release(Lease(lease.cluster, lease.host, lease.pid, lease.token, os.dup(lease.handle)))
    with pytest.raises(StoreOwned, match="nobody now, but this process's lease was ended"):
        store.heartbeat(lease, now=1001.0)


def test_an_embedded_run_and_a_clusters_controller_share_a_home(store: Store) -> None:
    live = store.acquire("10.0.0.1:6379", "head", 77, now=1000.0)
    with Store(store.home) as second:
        embedded = second.acquire("embedded-5f2c/../\n'é", "head", 78, now=1000.0)
        second.add(row("mine", cluster=embedded.cluster), note(), lease=embedded)
        store.add(row("theirs"), note(), lease=live)
        assert [job.id for job in second.active(embedded.cluster)] == ["mine"]
        second.release(embedded)
    store.heartbeat(live, now=1001.0)


def test_a_job_that_runs_is_not_removed_under_its_controller(store: Store) -> None:
    store.add(row("a", cluster="blue"), note())
    store.add(row("b", cluster="blue", state=JobState.FAILED), note())
    lease = store.acquire("blue", "head", 77, now=1000.0)
    with pytest.raises(StoreError, match="job 'a' is QUEUED; stop it before it is removed"):
        store.remove(["b", "a"])
    assert len(store.jobs()) == 2
    die(lease)
    store.remove(["b", "a"])
    assert store.jobs() == []


HOLDER = """
import os, subprocess, sys
from pathlib import Path
from raycontrol.store import Store
store = Store(Path(sys.argv[1]))
store.acquire("blue", "head", os.getpid(), now=1000.0)
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_is_succeeded_at_once_though_its_children_live(store: Store) -> None:
    holder = python(HOLDER, store.home)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(StoreOwned, match=f"pid {holder.pid} on head"):
            store.acquire("blue", "head", 1, now=1000.0)
        holder.kill()
        holder.wait(10)
        os.kill(child, 0)
        store.acquire("blue", "head", 1, now=1000.0)
    finally:
        os.kill(child, signal.SIGKILL)


RACE = """
import os, sys
from pathlib import Path
from raycontrol.errors import StoreOwned
from raycontrol.store import Store
def race():
    ready, go = os.pipe()
    finish, finished = os.pipe()
    children = []
    for name in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(go)
            os.close(finished)
            store = Store(Path(sys.argv[1]))
            os.read(ready, 1)
            try:
                store.acquire("blue", "head", os.getpid(), now=1000.0)
                os.write(1, f"won {os.getpid()}\\n".encode())
            except StoreOwned as error:
                os.write(1, b"lost\\n")
            os.read(finish, 1)
            os._exit(0)
    os.close(go)
    sys.stdin.readline()
    os.close(finished)
    for child in children:
        os.waitpid(child, 0)
race()
race()
"""


def test_of_processes_that_race_for_a_lease_exactly_one_wins(store: Store) -> None:
    racing = python(RACE, store.home)
    assert racing.stdin is not None
    assert racing.stdout is not None
    for _ in range(2):  # the second time, after a holder that ended without a word
        results = sorted(racing.stdout.readline() for _ in range(8))
        assert results[:7] == ["lost\n"] * 7
        lease = store.lease("blue")
        assert lease is not None
        assert results[7] == f"won {lease.pid}\n"
        print("next", file=racing.stdin, flush=True)
    assert racing.wait(10) == 0
