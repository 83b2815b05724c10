"""Faults while a job runs over real hosts: what it does not notice, and what it is tried again after."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable

import pytest

from tests.faults.scene import STARTED_S, Scene
from tests.ray.test_full_disk import fill
from tests.support import wait_until

pytestmark = pytest.mark.timeout(900)

VICTIM = "worker-0"
CUT_S = 10
LOCKED_S = 30
FENCE_S = 50
NOTICED_S = 16


def passes(seconds: float) -> Callable[[], bool]:
    over = time.monotonic() + seconds
    return lambda: time.monotonic() > over


# What a running job does not notice.


@pytest.mark.parametrize("name", ["rc-controller", "rc-archive"])
def test_a_servant_on_the_head_is_killed(scene: Scene, name: str) -> None:
    before = scene.actor(name)
    assert before is not None
    scene.kill_actor(name)
    wait_until(lambda: scene.is_renewed(name, before), 60, f"{name} is there again")
    scene.is_not_disturbed()


def test_the_actor_of_a_node_is_killed(scene: Scene) -> None:
    ip = scene.hosts.ip(scene.host_of(VICTIM))
    (node,) = [one["id"] for one in scene.cluster.ask()["nodes"] if one["ip"] == ip]
    before = scene.actor(f"rc-node:{node}")
    assert before is not None
    scene.kill_actor(f"rc-node:{node}")
    wait_until(lambda: scene.is_renewed(f"rc-node:{node}", before), 60, "the node's actor is there again")
    scene.is_not_disturbed()


def test_a_cable_is_out_for_10_s(scene: Scene) -> None:
    i = scene.host_of(VICTIM)
    scene.hosts.cut(i)
    wait_until(passes(CUT_S), 2 * CUT_S)
    scene.hosts.mend(i)
    wait_until(passes(NOTICED_S), 2 * NOTICED_S)
    scene.is_not_disturbed()


def test_the_store_is_locked_for_30_s(scene: Scene) -> None:
    with sqlite3.connect(scene.cluster.home / "store.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        wait_until(passes(LOCKED_S), 2 * LOCKED_S)
        other.execute("ROLLBACK")
    other.close()
    scene.is_not_disturbed()


def test_the_disk_of_the_head_is_full(scene: Scene) -> None:
    filler = fill(scene.cluster.home, leave=0)
    refused = scene.cluster.raycontrol(0, "submit", "--cpu", "0.1", "--", "true", timeout_s=STARTED_S)
    assert refused.returncode == 125 and "Traceback" not in refused.stderr
    scene.job.goes_on()
    filler.unlink()
    scene.is_not_disturbed()


def test_the_submitting_command_is_killed(scene: Scene) -> None:
    scene.job.let_go()
    (scene.job.folder / "go").unlink()
    for path in scene.job.folder.glob("0.*"):
        path.unlink()
    submitter = scene.cluster.popen(0, "run", *scene.arguments)
    scene.job.id = wait_until(lambda: running(scene), STARTED_S, "the job is submitted")
    scene.job.pids = wait_until(scene.job.runs, STARTED_S, "the job runs")
    submitter.send_signal(signal.SIGKILL)
    submitter.communicate()
    scene.is_not_disturbed()


def running(scene: Scene) -> str:
    jobs = scene.cluster.json(0, "list", timeout_s=60)
    return next((job["id"] for job in jobs if job["name"] == "job" and job["state"] == "RUNNING"), "")


# What a job is tried again after.


def test_the_actor_of_an_instance_is_killed(scene: Scene) -> None:
    scene.kill_actor(f"{scene.job.id}.0:{VICTIM}")
    scene.is_tried_again("INSTANCE_LOST", VICTIM, "its actor died")


def test_a_supervisor_is_killed(scene: Scene) -> None:
    i, pid = scene.host_of(VICTIM), scene.job.pids[VICTIM]
    parent = scene.hosts.run(i, ["ps", "-o", "ppid=", "-p", str(pid)], check=True).stdout
    scene.kill(i, int(parent))
    scene.is_tried_again("INSTANCE_FAILED", VICTIM, "its supervisor was killed")


def test_a_rank_is_killed(scene: Scene) -> None:
    rank = int((scene.job.folder / f"rank.{VICTIM}").read_text())
    scene.kill(scene.host_of(VICTIM), rank)
    scene.is_tried_again("INSTANCE_FAILED", VICTIM, "exited 137")


def test_a_raylet_is_killed(doomed: Scene) -> None:
    i = doomed.host_of(VICTIM)
    raylet = doomed.hosts.run(i, ["pgrep", "-f", "-o", "raylet/raylet"], check=True).stdout
    doomed.kill(i, int(raylet))
    first = doomed.is_tried_again("INSTANCE_LOST", VICTIM)
    assert doomed.hosts.name(i) in first["nodes"]


def test_a_raylet_hangs(doomed: Scene) -> None:
    """Ray gives the node up, though it lives and nothing is cut; its instance has to end by itself."""
    i = doomed.host_of(VICTIM)
    raylet = doomed.hosts.run(i, ["pgrep", "-f", "-o", "raylet/raylet"], check=True).stdout.strip()
    doomed.hosts.run(i, ["kill", "-STOP", raylet], check=True)
    doomed.is_tried_again("INSTANCE_LOST", VICTIM)
    doomed.kill(i, int(raylet))


def test_a_host_loses_power(doomed: Scene) -> None:
    i = doomed.host_of(VICTIM)
    doomed.hosts.cut(i)
    doomed.hosts.kill(i)
    first = doomed.is_tried_again("INSTANCE_LOST", VICTIM)
    assert doomed.hosts.name(i) in first["nodes"]


def test_a_cable_is_out_for_good(doomed: Scene) -> None:
    """The host itself goes on, and with it the attempt, until its fence falls; only then the next one begins."""
    i = doomed.host_of(VICTIM)
    cut_at = time.time()
    doomed.hosts.cut(i)
    doomed.is_tried_again("INSTANCE_LOST", VICTIM)
    (there,) = [one for one in doomed.job.beats() if (one.attempt, one.instance) == (0, VICTIM)]
    assert FENCE_S - 10 < there.times[-1] - cut_at < FENCE_S + 10
    wait_until(lambda: not sleepers(doomed, i), 30, "nothing of the job is left on the host")


def sleepers(scene: Scene, i: int) -> list[str]:
    return scene.hosts.run(i, ["pgrep", "-x", "sleep"]).stdout.split()
