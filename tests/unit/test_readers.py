"""Reading without a cluster."""

from __future__ import annotations

from pathlib import Path

from raycontrol.readers import StoreReader
from raycontrol.store import Store
from tests.unit.store_rows import note, row


def test_a_reader_that_looked_before_there_was_a_store_sees_it_when_it_comes(tmp_path: Path) -> None:
    reader = StoreReader(tmp_path)
    assert reader.find("") == []
    with Store(tmp_path) as store:
        store.add(row("digits-1"), note())
    assert reader.find("dig") == ["digits-1"]
