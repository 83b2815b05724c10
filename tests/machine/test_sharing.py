"""A folder that all nodes share is proved, not believed: each node here has its own view of it."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol.preparing import Preparation
from raycontrol.sharedprobe import PROBES, Probed, probe
from raycontrol.sharing import HOLDS_S, Sharing
from tests.machine.instances import Gang, play

HEAD = "head"
UID = os.geteuid()


class Views:
    """Nodes by id, and the folder of this machine that each sees as the shared one; None: its file server is dead."""

    def __init__(self, **folders: Path | None) -> None:
        self.folders = folders
        self.asked: list[tuple[str, str]] = []

    async def head_id(self) -> str:
        return HEAD

    async def probe_shared(self, node_id: str, act: str, folder: str, name: str, text: str) -> Probed:
        self.asked.append((node_id, act))
        view = self.folders[node_id]
        return await asyncio.Event().wait() if view is None else probe(act, str(view), name, text)  # type: ignore[return-value]


def found(views: Views, node: str) -> str | None:
    answer = asyncio.run(Sharing(views, lambda: "/mnt/all é").of(node, f"host-{node}"))
    assert answer is not None
    return answer.fault


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_a_folder_that_both_see_is_shared_and_no_probe_is_left(tmp_path: Path) -> None:
    shared = folder(tmp_path / "with 'quotes'\nand a line é")
    assert found(Views(head=shared, a=shared), "a") is None
    assert found(Views(head=shared), HEAD) is None
    assert list((shared / PROBES).iterdir()) == []


def test_one_that_only_looks_the_same_is_named_with_nodes_and_users(tmp_path: Path) -> None:
    views = Views(head=folder(tmp_path / "one"), a=folder(tmp_path / "other"))
    assert found(views, "a") == (
        f"shared_dir /mnt/all é is not shared by host-a: what the head (uid {UID}) wrote, host-a (uid {UID}) does not find "
        "there: No such file or directory"
    )


def test_a_mount_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    views = Views(head=folder(tmp_path / "shared"), a=tmp_path / "not-mounted")
    assert found(views, "a") == (
        f"shared_dir /mnt/all é is not shared by host-a: what the head (uid {UID}) wrote, host-a (uid {UID}) does not find "
        "there: No such file or directory"
    )
    assert not (tmp_path / "not-mounted").exists()
    assert found(Views(head=tmp_path / "nowhere"), HEAD) == (
        f"shared_dir /mnt/all é is not shared by host-head: the head (uid {UID}) cannot write there: No such file or directory"
    )


def test_what_is_proved_is_not_asked_again_until_somebody_wants_it_anew(tmp_path: Path) -> None:
    shared = folder(tmp_path / "shared")
    views = Views(head=shared, a=shared)
    sharing = Sharing(views, lambda: "/mnt/all")

    async def story() -> None:
        first = await sharing.of("a", "host-a")
        asked = len(views.asked)
        assert (await sharing.of("a", "host-a"), len(views.asked)) == (first, asked)
        views.folders["a"] = folder(tmp_path / "other")
        again = await sharing.of("a", "host-a", anew=True)
        assert again is not None
        assert again.fault is not None

    asyncio.run(story())


def test_what_others_have_left_there_for_an_hour_is_removed_with_the_next_first_proof(tmp_path: Path) -> None:
    shared = folder(tmp_path / "shared")
    (shared / PROBES).mkdir()
    for name, age_s in (("old", 3700), ("young", 60)):
        (shared / PROBES / name).touch()
        os.utime(shared / PROBES / name, (time.time() - age_s,) * 2)
    assert probe("begin", str(shared), "new", "text").fault is None
    assert sorted(path.name for path in (shared / PROBES).iterdir()) == ["new", "young"]


def test_a_good_proof_holds_for_a_minute_only(tmp_path: Path) -> None:
    shared, now = folder(tmp_path / "shared"), 0.0
    views = Views(head=shared, a=shared)
    sharing = Sharing(views, lambda: "/mnt/all", lambda: now)

    async def fault() -> str | None:
        answer = await sharing.of("a", "host-a")
        assert answer is not None
        return answer.fault

    async def story() -> None:
        nonlocal now
        assert await fault() is None
        views.folders["a"] = folder(tmp_path / "the empty mount point")
        now = HOLDS_S
        assert await fault() is None
        now = HOLDS_S + 1
        assert "host-a (uid" in str(await fault())
        assert list((tmp_path / "the empty mount point").iterdir()) == []

    asyncio.run(story())


def test_when_the_heads_mount_goes_away_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    shared = folder(tmp_path / "shared")
    views = Views(head=shared, a=shared)
    sharing = Sharing(views, lambda: "/mnt/all")

    async def story() -> None:
        await sharing.of("a", "host-a")
        views.folders["head"] = folder(tmp_path / "the empty mount point")
        answer = await sharing.of(HEAD, "host-head", anew=True)
        assert answer is not None
        assert answer.fault == (
            f"shared_dir /mnt/all is not shared by host-head: the head (uid {UID}) cannot write there: No such file or directory"
        )
        assert list((tmp_path / "the empty mount point").iterdir()) == []

    asyncio.run(story())


def test_without_a_folder_in_the_settings_nobody_is_asked() -> None:
    views = Views()
    assert asyncio.run(Sharing(views, lambda: None).of("a", "host-a")) is None
    assert views.asked == []


# What an instance makes of it.


def test_outputs_of_a_job_go_to_a_folder_that_is_shared_and_are_not_shipped(tmp_path: Path) -> None:
    shared = folder(tmp_path / "shared")
    probe("begin", str(shared), "of the head", "it is there")

    async def story() -> Gang:
        gang = Gang(tmp_path)
        await gang.instance.prepare(Preparation(None, (), shared_dir=str(shared)))
        facts = (await gang.heard("InstancePrepared")).facts
        assert (facts.output_dir, facts.shared_outputs) == (
            f"{shared}/jobs/{gang.job_id}/outputs/worker-0",
            True,
        )
        command = "echo 7 > $RAYCONTROL_OUTPUT_DIR/answer"
        environment = {"RAYCONTROL_OUTPUT_DIR": facts.output_dir}
        await gang.instance.carry_out(gang.orders(command, environment=environment))
        await gang.heard("RunExited")
        await gang.closed()
        return gang

    gang = play(story())
    assert (shared / "jobs" / gang.job_id / "outputs" / "worker-0" / "answer").read_text() == "7\n"
    assert gang.links.outputs == {}


@pytest.mark.parametrize("point", ["empty", "missing"])
def test_a_folder_that_was_unmounted_since_its_proof_is_not_made_and_outputs_are_collected(
    tmp_path: Path, point: str
) -> None:
    shared = tmp_path / "mount point"
    if point == "empty":
        shared.mkdir()

    async def story() -> Gang:
        gang = Gang(tmp_path)
        await gang.instance.prepare(Preparation(None, (), shared_dir=str(shared)))
        facts = (await gang.heard("InstancePrepared")).facts
        assert not facts.shared_outputs
        (Path(facts.output_dir) / "answer").write_text("7\n")
        told = await gang.heard("InstanceNoted")
        assert told.message == (
            f"its outputs are collected at its end, because shared_dir {shared} cannot be used on {facts.node_name} any more: "
            "No such file or directory"
        )
        await gang.instance.carry_out(gang.orders("true"))
        await gang.heard("RunExited")
        await gang.closed()
        return gang

    assert play(story()).links.outputs == {"answer": b"7\n"}
    assert not shared.exists() if point == "missing" else list(shared.iterdir()) == []


def test_where_it_is_not_shared_outputs_are_collected_and_the_job_is_told_why(tmp_path: Path) -> None:
    fault = "shared_dir /mnt/all is not shared by host-b: nothing there"

    async def story() -> Gang:
        gang = Gang(tmp_path)
        await gang.instance.prepare(Preparation(None, (), not_shared=fault))
        facts = (await gang.heard("InstancePrepared")).facts
        (Path(facts.output_dir) / "answer").write_text("7\n")
        told = await gang.heard("InstanceNoted")
        assert told.message == f"its outputs are collected at its end, because {fault}"
        await gang.instance.carry_out(replace(gang.orders("true")))
        await gang.heard("RunExited")
        await gang.closed()
        return gang

    assert play(story()).links.outputs == {"answer": b"7\n"}
