"""Reading without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.client import Client
from raycontrol.disk import HIDDEN
from raycontrol.readers import completed
from raycontrol.settings import Settings
from raycontrol.store import Store
from raycontrol.storereader import StoreReader
from tests.unit.rights import unprivileged
from tests.unit.store_rows import note, row


def test_a_reader_that_looked_before_there_was_a_store_sees_it_when_it_comes(tmp_path: Path) -> None:
    reader = StoreReader(tmp_path)
    assert reader.find("") == []
    with Store(tmp_path) as store:
        store.add(row("digits-1"), note())
    assert reader.find("dig") == ["digits-1"]


def test_a_client_that_finds_neither_cluster_nor_store_says_where_it_looked(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path), ray_tmpdir=str(tmp_path))
    with Client(settings=settings) as client:
        assert client.list() == []
        assert client.offline == (
            f"no Ray cluster was found, and nothing is stored in {tmp_path}; RAYCONTROL_URL names a server, "
            "RAY_ADDRESS a cluster, RAYCONTROL_HOME another folder"
        )
    Store(tmp_path).close()
    with Client(settings=settings) as client:
        assert client.list() == []
        assert client.offline is None


def test_a_reader_works_within_a_running_event_loop(tmp_path: Path) -> None:
    log = tmp_path / "jobs/digits-1/logs/0/worker-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")

    async def program() -> None:
        reader = StoreReader(tmp_path)
        assert reader.log_sizes("digits-1", 0) == {"worker-0": 8}
        assert reader.log_news("digits-1", 0, {"worker-0": 4}, 0, 100, None) == {"worker-0": b"two\n"}
        assert reader.sizes_of_jobs() == {"digits-1": 8}

    asyncio.run(program())


def test_an_error_comes_out_of_the_other_thread_as_it_was() -> None:
    async def fails() -> None:
        raise KeyError("why")

    async def program() -> None:
        completed(fails())

    with pytest.raises(KeyError, match="why"):
        asyncio.run(program())


def test_a_reader_removes_nothing(tmp_path: Path) -> None:
    left = tmp_path / f"jobs/{HIDDEN}abc/logs"
    left.mkdir(parents=True)
    StoreReader(tmp_path)
    assert left.is_dir()
    Archive(tmp_path).close()
    assert not left.is_dir()


def test_a_home_that_may_not_be_looked_into_is_no_obstacle_to_an_archive(tmp_path: Path) -> None:
    part = tmp_path / "home/packages/incoming/x.part"
    part.parent.mkdir(parents=True)
    part.touch()
    (tmp_path / "home").chmod(0o700)
    with unprivileged(tmp_path):
        Archive(tmp_path / "home").close()
        StoreReader(tmp_path / "home")
    assert part.exists()
