from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from raycontrol.database import MIGRATIONS, file_system_type, metadata, refuse_network_file_system
from raycontrol.errors import IdTaken, JobIsThere, StoreError
from raycontrol.status import Event, JobState, Reason
from raycontrol.store import Change, New, Store
from tests.unit.store_rows import note, row

V1 = Path(__file__).with_name("store_v1.sql")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home") as store:
        yield store


def plain(store: Store) -> sqlite3.Connection:
    """The store's file, as any other program would open it."""
    return sqlite3.connect(store.home / "store.db")


def home_of(tmp_path: Path, script: str) -> Path:
    (tmp_path / "home").mkdir()
    connection = sqlite3.connect(tmp_path / "home" / "store.db")
    connection.executescript(script)
    connection.close()
    return tmp_path / "home"


def test_a_job_is_read_back_as_it_was_added(store: Store) -> None:
    odd = row(
        "a'b", name='"; DROP TABLE jobs --', user="Änne", doc='{"x": "\\u0000 \\n"}', submitted_at=0.1 + 0.2
    )
    assert store.add(odd, note()) == Event(**note().model_dump(), seq=1, job_id="a'b")
    assert store.job("a'b") == odd
    assert store.job("a") is None


def test_the_packages_of_all_jobs_are_told_without_reading_the_jobs(store: Store) -> None:
    docs = (
        '{"package": "p1"}',
        '{"package": "p2"}',
        '{"package": "p1"}',
        '{"package": null}',
        "{}",
        "[",
        '"p3"',
    )
    for number, doc in enumerate(docs):
        store.add(row(f"job-{number}", doc=doc), note())
    assert store.packages() == {"p1", "p2"}


def test_a_second_job_of_an_id_is_refused(store: Store) -> None:
    store.add(row(), note())
    with pytest.raises(StoreError, match="job 'digits-1' is already in the store"):
        store.add(row(name="other"), note())
    assert store.job("digits-1") == row()
    assert len(store.events("digits-1")) == 1


def test_new_jobs_are_stored_all_or_none(store: Store) -> None:
    store.add(row("b"), note())
    with pytest.raises(JobIsThere, match="'b' is already in the store"):
        store.add_all([New(row("a"), note()), New(row("b"), note())])
    assert store.job("a") is None
    told = store.add_all([New(row("a"), note("first")), New(row("c"), note("second"))])
    assert [(one.job_id, one.message) for one in told] == [("a", "first"), ("c", "second")]


def test_a_change_stores_the_row_and_its_events(store: Store) -> None:
    store.add(row(), note())
    running = row(state=JobState.RUNNING, doc='{"attempt": 0}')
    told = store.save(
        [
            Change(
                running,
                (
                    note("placed", state=JobState.PLACING),
                    note("runs", state=JobState.RUNNING, instance="master-0", reason=Reason.PLACED),
                ),
            )
        ]
    )
    assert store.job("digits-1") == running
    assert [(event.seq, event.message, event.instance) for event in told] == [
        (2, "placed", None),
        (3, "runs", "master-0"),
    ]
    assert store.events("digits-1", after=1) == told
    assert store.events("digits-1", limit=1)[0].message == "submitted by ann"


def test_changes_are_stored_all_or_none(store: Store) -> None:
    store.add(row("a"), note())
    with pytest.raises(StoreError, match="job 'b' is not in the store"):
        store.save([Change(row("a", state=JobState.RUNNING), (note("runs"),)), Change(row("b"), (note(),))])
    assert store.job("a") == row("a")
    assert len(store.events("a")) == 1


@pytest.mark.parametrize("end", [JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED])
def test_a_terminal_state_never_changes(store: Store, end: JobState) -> None:
    ended = row(state=end, ended_at=2000.0)
    store.add(row(), note())
    store.save([Change(ended, (note("ended", state=end),))])
    for again in (row(state=JobState.RUNNING), ended):
        with pytest.raises(
            StoreError, match=f"job 'digits-1' has ended as {end}; a terminal state never changes"
        ):
            store.save([Change(again, (note("late"),))])
    assert store.job("digits-1") == ended
    assert [event.message for event in store.events("digits-1")] == ["submitted by ann", "ended"]


def test_sql_from_outside_cannot_change_a_terminal_row_or_an_event(store: Store) -> None:
    store.add(row(state=JobState.FAILED), note())
    for statement in (
        "UPDATE jobs SET state = 'RUNNING'",
        "UPDATE jobs SET doc = '{}'",
        "UPDATE events SET message = ''",
    ):
        connection = plain(store)
        with pytest.raises(sqlite3.IntegrityError, match="never changes"):
            connection.execute(statement)
        connection.close()


def test_a_change_of_another_clusters_job_is_refused(store: Store) -> None:
    store.add(row(), note())
    with pytest.raises(StoreError, match=r"belongs to cluster '10.0.0.1:6379', not to 'embedded-1'"):
        store.save([Change(row(cluster="embedded-1"))])


def test_jobs_are_listed_newest_first_in_pages(store: Store) -> None:
    for number in range(10):
        store.add(row(f"job-{number}", submitted_at=1000.0 + number // 4), note())
    everything = [job.id for job in store.jobs()]
    assert everything == [f"job-{number}" for number in reversed(range(10))]
    pages, before = [], None
    while page := store.jobs(limit=3, before=before):
        pages += [job.id for job in page]
        before = (page[-1].submitted_at, page[-1].id)
        store.add(row(f"new-{len(pages)}", submitted_at=2000.0), note())  # does not shift the pages
    assert pages == everything


def test_jobs_are_filtered(store: Store) -> None:
    store.add(row("a", user="bo"), note())
    store.add(row("b", state=JobState.RUNNING), note())
    store.add(row("c", cluster="other", state=JobState.FAILED), note())
    assert [job.id for job in store.jobs(user="bo")] == ["a"]
    assert [job.id for job in store.jobs(states=[JobState.RUNNING, "FAILED"])] == ["c", "b"]
    assert [job.id for job in store.jobs(cluster="other", states=[])] == []
    assert [job.id for job in store.jobs(cluster="other")] == ["c"]


def test_active_jobs_are_those_of_the_cluster_that_have_not_ended_oldest_first(store: Store) -> None:
    for number, state in enumerate(JobState):
        store.add(row(f"job-{number}", state=state, submitted_at=1000.0 - number), note())
    store.add(row("other", cluster="other"), note())
    assert [job.id for job in store.active("10.0.0.1:6379")] == [
        f"job-{number}" for number in (5, 4, 3, 2, 1, 0)
    ]


def test_a_prefix_finds_ids_exactly_as_written(store: Store) -> None:
    for job_id in ("ab", "abc", "abd", "aBx", "a%", "a_"):
        store.add(row(job_id), note())
    assert store.find("ab") == ["ab"]
    assert store.find("abc") == ["abc"]
    assert store.find("aB") == ["aBx"]
    assert store.find("a%") == ["a%"]
    assert store.find("a") == ["a%", "aBx", "a_", "ab", "abc", "abd"]
    assert store.find("z") == []


def test_a_removed_job_takes_its_events_along_and_numbers_are_not_used_again(store: Store) -> None:
    store.add(row("a", state=JobState.FAILED), note())
    store.remove(["a", "never-there"])
    assert store.job("a") is None
    assert store.events("a") == []
    assert store.add(row("b"), note()).seq == 2


def test_the_id_of_a_removed_job_is_never_used_again(store: Store) -> None:
    store.add(row("a", state=JobState.FAILED), note())
    store.remove(["a", "never-there"])
    for user in ("ann", "bo"):
        with pytest.raises(
            IdTaken, match="job id 'a' was used by a job that has been removed; choose another"
        ):
            store.add(row("a", user=user), note())
    assert store.jobs() == []
    store.remove(["a"])
    store.add(row("never-there"), note())


def test_whoever_removes_a_job_its_id_is_remembered(store: Store) -> None:
    store.add(row("a", state=JobState.FAILED), note())
    connection = plain(store)
    connection.execute("DELETE FROM jobs")
    connection.commit()
    connection.close()
    with pytest.raises(IdTaken):
        store.add(row("a"), note())


def test_text_that_is_not_unicode_is_a_store_error(store: Store) -> None:
    with pytest.raises(StoreError, match="not valid Unicode"):
        store.add(row(name="\udcff"), note())
    assert store.jobs() == []


def test_a_missing_store_is_none_or_an_error_and_is_not_made(tmp_path: Path) -> None:
    assert Store.open_existing(tmp_path / "home") is None
    with pytest.raises(StoreError, match=f"there is no store in {tmp_path}/home; the first job makes it"):
        Store(tmp_path / "home", create=False)
    assert not (tmp_path / "home").exists()


def test_an_existing_store_is_opened_with_what_it_holds(store: Store) -> None:
    store.add(row(), note())
    again = Store.open_existing(store.home)
    assert again is not None
    with again:
        assert again.jobs() == [row()]


def test_a_path_with_odd_characters_is_a_path_like_any_other(tmp_path: Path) -> None:
    home = tmp_path / "a?mode=memory#%20 'ü"
    with Store(home) as store:
        store.add(row(), note())
    assert (home / "store.db").stat().st_size > 0


def test_home_and_file_are_private(store: Store) -> None:
    store.add(row(), note())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (store.home, *store.home.iterdir())}
    assert modes == {
        "home": 0o700,
        "locks": 0o700,
        "store.db": 0o600,
        "store.db-wal": 0o600,
        "store.db-shm": 0o600,
    }


def test_a_folder_that_holds_other_things_keeps_its_mode_and_a_loose_file_is_tightened(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine").touch()
    Store(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    (tmp_path / "store.db").chmod(0o644)
    Store(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "store.db").stat().st_mode) == 0o600


def test_commits_are_synchronous_and_logged_ahead(store: Store) -> None:
    with store._database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30000


def test_the_tables_in_the_code_are_those_in_the_schema(store: Store) -> None:
    seen = inspect(create_engine(f"sqlite:///{store.home}/store.db"))
    assert set(seen.get_table_names()) == {*metadata.tables, "schema_version"}
    for table in metadata.tables.values():
        columns = {(column["name"], column["nullable"]) for column in seen.get_columns(table.name)}
        assert columns == {(column.name, column.nullable) for column in table.columns}


def test_a_store_of_schema_1_opens_with_everything_in_it(tmp_path: Path) -> None:
    with Store(home_of(tmp_path, V1.read_text())) as store:
        assert [(job.id, job.state, job.ended_at) for job in store.jobs()] == [
            ("digits-2", JobState.RUNNING, None),
            ("digits-1", JobState.SUCCEEDED, 1060.5),
        ]
        assert [event.seq for event in store.events("digits-1")] == [1, 3]
        with pytest.raises(StoreError, match="never changes"):
            store.save([Change(row("digits-1"))])
        assert store.add(row("digits-3"), note()).seq == 5


NEXT = (*MIGRATIONS, ("ALTER TABLE jobs ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'", "UPDATE jobs SET colour = 'red' WHERE state = 'RUNNING'"))  # fmt: skip


def test_an_older_store_is_migrated_step_by_step(tmp_path: Path) -> None:
    steps = (
        *NEXT,
        ("CREATE TABLE marks (job_id TEXT)", "INSERT INTO marks SELECT id FROM jobs WHERE colour = 'red'"),
    )
    with Store(home_of(tmp_path, V1.read_text()), migrations=steps) as store:
        assert [job.id for job in store.jobs()] == ["digits-2", "digits-1"]
    connection = plain(store)
    assert connection.execute("SELECT job_id FROM marks").fetchall() == [("digits-2",)]
    assert connection.execute("SELECT version FROM schema_version").fetchall() == [(len(MIGRATIONS) + 2,)]
    connection.close()


def test_a_migration_that_fails_leaves_the_last_whole_version(tmp_path: Path) -> None:
    home = home_of(tmp_path, V1.read_text())
    with pytest.raises(StoreError, match="no such table: absent"):
        Store(home, migrations=(*NEXT, ("CREATE TABLE half (x)", "DELETE FROM absent")))
    connection = sqlite3.connect(home / "store.db")
    assert connection.execute("SELECT version FROM schema_version").fetchall() == [(len(NEXT),)]
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
    connection.close()
    with Store(home, migrations=NEXT) as store:
        assert len(store.jobs()) == 2


def test_a_store_is_not_migrated_under_a_living_controller(store: Store) -> None:
    lease = store.acquire("blue", "head", 77, now=1000.0)
    with pytest.raises(
        StoreError,
        match=r"an older raycontrol is using it \(cluster 'blue', pid 77 on head\); install this version on",
    ):
        Store(store.home, migrations=NEXT)
    store.release(lease)
    Store(store.home, migrations=NEXT).close()


def test_a_store_of_a_newer_version_is_refused(store: Store) -> None:
    Store(store.home, migrations=NEXT).close()
    with pytest.raises(
        StoreError,
        match=r"written by a newer raycontrol \(schema 5, this one knows up to 4\); install the newer",
    ):
        Store(store.home)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/ann ext4 rw 0 0
me@host:/ /mnt/my\\040files fuse.sshfs rw 0 0
tmpfs /mnt/scratch lustre rw 0 0
/dev/vdc /mnt/scratch xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/bo/.raycontrol", "nfs4"),
        ("/home/ann/.raycontrol", "ext4"),
        ("/home/annika", "nfs4"),
        ("/mnt/my files/x", "fuse.sshfs"),
        ("/mnt/scratch/x", "xfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_mount(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused() -> None:
    with pytest.raises(
        StoreError,
        match=r"/home/bo is on a network file system \(nfs4\).*set RAYCONTROL_HOME to a folder on a",
    ):
        refuse_network_file_system(Path("/home/bo"), MOUNTS)
    refuse_network_file_system(Path("/home/ann"), MOUNTS)
