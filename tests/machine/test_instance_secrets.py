"""What an instance does with the values of a job's ``secret_env``."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.machine.instances import Gang, play, until

pytestmark = pytest.mark.timeout(60)

HIDDEN = "hf_nobody-may-see-this"
SHOWS = 'echo "got ${HF_TOKEN#hf_} and $LR"; sleep 100'


def command_lines() -> Iterator[bytes]:
    """What ``ps`` shows of every process of this machine, the supervisor among them."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            yield file.read_bytes()


def holders(folder: Path) -> list[Path]:
    """The files that hold the hidden value."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.relative_to(folder) for path in files if HIDDEN.encode() in path.read_bytes()]


def test_a_start_command_has_its_secrets_and_nobody_sees_them(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        await gang.prepared()
        orders = gang.orders(SHOWS, environment={"LR": "0.1", "HF_TOKEN": None})
        orders = replace(orders, secret_env={"HF_TOKEN": HIDDEN})
        assert HIDDEN not in repr(orders)
        await gang.instance.carry_out(orders)
        await gang.heard("StagePassed")
        await until(lambda: b"got" in gang.links.log, "the first line")
        assert gang.links.log == b"got nobody-may-see-this and 0.1\n"
        assert [line for line in command_lines() if HIDDEN.encode() in line] == []
        assert holders(gang.private) == []
        await gang.closed()
        assert HIDDEN not in repr(gang.links.reports)

    play(story())


def test_where_stand_ins_read_the_environment_the_file_is_their_owners_alone(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        await gang.prepared()
        orders = replace(gang.orders("sleep 100"), files={"bin/nothing": "#!/bin/sh\n"})
        await gang.instance.carry_out(replace(orders, secret_env={"HF_TOKEN": HIDDEN}))
        await gang.heard("StagePassed")
        assert holders(gang.private) == [Path("environment")]
        assert stat.S_IMODE((gang.private / "environment").stat().st_mode) == 0o600
        await gang.closed()

    play(story())
