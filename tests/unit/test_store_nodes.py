"""Offline nodes and groups of nodes in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.database import MIGRATIONS
from raycontrol.hardware import OfflineNode
from raycontrol.store import Store
from tests.unit.store_rows import note, row


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home") as store:
        yield store


def offline(name: str, reason: str = "fan", at: float = 1000.0) -> OfflineNode:
    return OfflineNode(name=name, reason=reason, by="ada", at=at)


def test_offline_nodes_are_kept_by_name_for_their_cluster(store: Store) -> None:
    store.nodes.set_offline("east", [offline("b"), offline("a")])
    store.nodes.set_offline("west", [offline("c")])
    store.nodes.set_offline("east", [offline("b", "disk", 2000.0)])
    store.nodes.set_online("east", ["a", "never"])
    with Store(store.home) as again:
        assert again.nodes.offline("east") == [offline("b", "disk", 2000.0)]
        assert again.nodes.offline("west") == [offline("c")]


def test_a_group_is_there_as_long_as_it_has_a_node(store: Store) -> None:
    store.nodes.add_to_group("east", "train", ["b", "a"])
    store.nodes.add_to_group("east", "train", ["b", "c"])
    store.nodes.add_to_group("east", "big", ["a"])
    store.nodes.add_to_group("west", "train", ["z"])
    assert store.nodes.groups("east") == {"big": ("a",), "train": ("a", "b", "c")}
    store.nodes.remove_from_group("east", "train", ["a", "b"])
    store.nodes.remove_from_group("east", "big", ["a"])
    with Store(store.home) as again:
        assert again.nodes.groups("east") == {"train": ("c",)}
    store.nodes.remove_from_group("east", "train", None)
    assert (store.nodes.groups("east"), store.nodes.groups("west")) == ({}, {"train": ("z",)})


def test_a_store_from_before_there_were_groups_gets_the_tables(tmp_path: Path) -> None:
    home = tmp_path / "old"
    with Store(home, migrations=MIGRATIONS[:3]) as old:
        old.add(row("digits-1"), note())
    with Store(home) as store:
        assert store.nodes.offline("east") == [] and store.nodes.groups("east") == {}
        assert [found.id for found in store.jobs()] == ["digits-1"]
