"""``mounts`` of a spec: what is accepted, and what becomes of it in plans."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol.backends import make_plan, plan_of
from raycontrol.errors import PlanError, SpecError
from raycontrol.plan import Brief, Facts, Mount, Plan, orders, render
from raycontrol.spec import JobSpec

BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")


def facts(instance: str) -> Facts:
    return Facts(
        instance=instance,
        ip="10.0.0.1",
        node_name="host-a",
        ports={"probe": "40001", "master": "40002", "ssh": "2200"},
        code_dir="/scratch/code",
        output_dir="/scratch/outputs",
        private_dir=f"/scratch/runs/{instance}",
        python="/venv/bin/python",
        package_dir="/venv/raycontrol",
    )


def plan(**fields: Any) -> Plan:
    lead = "launcher-0" if fields.get("mode") in ("mpi", "horovod") else "master-0"
    return make_plan(JobSpec(**{"command": "true", **fields}), BRIEF, (facts(lead),))


def fault(mounts: Any) -> str:
    with pytest.raises(SpecError) as caught:
        JobSpec(command="true", mounts=mounts)
    (found,) = caught.value.faults
    return str(found)


def test_relative_sources_are_of_the_code_and_absolute_ones_of_the_node() -> None:
    made = plan(
        mounts={
            "/opt/ml/code": "./src",
            "/opt/ml/input/data/": "/mnt/cfs/digits:ro",
            "/opt/all": ".",
            "/opt/odd": "/mnt/a:ro:rw",
            "/data 'é'\n": 'wörter "x"\n',
        }
    )
    assert made.mounts["master-0"] == (
        Mount('/scratch/code/wörter "x"\n', "/data 'é'\n"),
        Mount("/scratch/code", "/opt/all"),
        Mount("/scratch/code/src", "/opt/ml/code"),
        Mount("/mnt/cfs/digits", "/opt/ml/input/data", read_only=True),
        Mount("/mnt/a:ro", "/opt/odd"),
    )


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        (
            {"opt/code": "src"},
            "mounts.opt/code: targets must be absolute paths without `..`",
        ),
        (
            {"/opt/../etc": "src"},
            "mounts./opt/../etc: targets must be absolute paths without `..`",
        ),
        (
            {"/": "src"},
            "mounts./: targets must not be /, /bin, /etc, /home, /lib, /lib64, /root, /run, /sbin, /tmp, /usr, /var, nor "
            "anything of /proc, /sys, /dev",
        ),
        (
            {"/proc/self": "src"},
            "mounts./proc/self: targets must not be /, /bin, /etc, /home, /lib, /lib64, /root, /run, /sbin, /tmp, /usr, /var, "
            "nor anything of /proc, /sys, /dev",
        ),
        (
            {"/opt/code": "../src"},
            "mounts./opt/code: must not leave the code's folder with `..`; a path of the nodes is written from `/` on, "
            'got "../src"',
        ),
        (
            {"/opt/code": "~/src"},
            'mounts./opt/code: must not begin with `~`: write out the path that the nodes have, got "~/src"',
        ),
        ({"/opt/code": ":ro"}, 'mounts./opt/code: must name a folder or a file, got ":ro"'),
        (
            {"/opt/ml": "a", "/opt/ml/code": "b"},
            "mounts: must have targets none of which is another or lies below it, as /opt/ml/code does below /opt/ml, got a mapping",
        ),
        (
            {"/opt/ml": "a", "/opt/ml/": "b"},
            "mounts: must have targets none of which is another or lies below it, as /opt/ml does below /opt/ml, got a mapping",
        ),
    ],
)
def test_faults(mounts: Any, expected: str) -> None:
    assert fault(mounts) == expected


def test_a_target_that_would_hide_what_the_instance_needs_is_no_plan() -> None:
    with pytest.raises(PlanError) as caught:
        plan(mounts={"/scratch": "/mnt/data"})
    assert (
        str(caught.value)
        == "mounts: /scratch would hide /scratch/runs/master-0, which master-0 needs on host-a"
    )


def test_a_hostfile_that_the_command_names_is_mounted_where_that_is_possible() -> None:
    made = plan(mode="mpi", command="cat /etc/mpi/hostfile")
    assert made.mounts["launcher-0"] == (
        Mount("/scratch/runs/launcher-0/hostfile", "/etc/mpi/hostfile", optional=True),
    )


def test_one_that_it_does_not_name_is_mounted_only_beside_a_folder_of_the_node() -> None:
    made = plan(mode="horovod", command="horovodrun python train.py")
    assert made.mounts["launcher-0"] == (
        Mount("/scratch/runs/launcher-0/hostfile", "/etc/mpi/hostfile", optional=True, beside="/etc/mpi"),
    )


def test_a_job_that_mounts_a_hostfile_of_its_own_gets_that_one() -> None:
    made = plan(mode="mpi", command="cat /etc/mpi/hostfile", mounts={"/etc/mpi": "hosts"})
    assert made.mounts["launcher-0"] == (Mount("/scratch/code/hosts", "/etc/mpi"),)


def test_a_job_without_mounts_has_none_in_its_plan() -> None:
    assert plan().mounts == {}
    assert plan(mode="ddp", command="cat /etc/mpi/hostfile").mounts == {}


def test_mounts_go_with_the_orders_of_the_first_stage() -> None:
    made = plan(mounts={"/opt/ml/code": "src"}, mode="mpi")
    assert [mount.target for mount in orders(made, 0, "launcher-0").mounts] == [
        "/opt/ml/code",
        "/etc/mpi/hostfile",
    ]
    assert orders(made, 1, "launcher-0").mounts == ()


def test_a_plan_shows_its_mounts() -> None:
    spec = JobSpec(command="cat /etc/mpi/hostfile", mode="mpi", mounts={"/opt/ml/code": "src:ro"})  # type: ignore[arg-type]
    lines = [line.strip() for line in render(plan_of(spec)).splitlines() if "  mounts" in line]
    assert lines == [
        "mounts /opt/ml/code from <code dir>/src, read-only",
        "mounts /etc/mpi/hostfile from <private dir of launcher-0>/hostfile (where the node lets it make mounts)",
    ]
