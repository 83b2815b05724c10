"""An instance whose runs have mounts, with real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raycontrol.plan import Mount
from tests.machine.instances import Gang, play


def test_all_runs_of_an_instance_see_its_mounts(tmp_path: Path) -> None:
    async def story() -> bytes:
        gang = Gang(tmp_path)
        await gang.prepared()
        (gang.code / "src").mkdir()
        (gang.code / "src" / "job.py").write_text("print('found')\n")
        orders = gang.orders("cd /opt/ml-test/code; python3 job.py", cwd="/opt/ml-test/code")
        mounts = (
            Mount(str(gang.code / "src"), "/opt/ml-test/code"),
            Mount("/no/such/hostfile", "/etc/mpi-test/hostfile", optional=True),
        )
        await gang.instance.carry_out(replace(orders, mounts=mounts))
        await gang.heard("RunExited")
        await gang.closed()
        return gang.links.log

    assert play(story()) == b"found\n"


def test_mounts_that_cannot_be_made_fail_the_stage_by_node_and_path(tmp_path: Path) -> None:
    async def story() -> str:
        gang = Gang(tmp_path)
        await gang.prepared()
        mounts = (Mount("/mnt/no-such-share", "/opt/ml-test/data"),)
        await gang.instance.carry_out(replace(gang.orders("true"), mounts=mounts))
        failed = await gang.heard("InstanceFailed")
        await gang.closed()
        return str(failed.message)

    assert play(story()) == (
        "worker-0 on host-b (127.0.0.1): its mounts cannot be made: /mnt/no-such-share, to be mounted at /opt/ml-test/data: "
        "No such file or directory"
    )
