"""Every kind of fault, over real hosts, while six jobs are in the six states that have no end in them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import FENCE_S, nothing_is_left
from tests.faults.scene import HEAD, STARTED_S, VICTIM, Scene
from tests.hosts.conftest import Cluster
from tests.ray.test_full_disk import fill
from tests.support import wait_until

pytestmark = pytest.mark.timeout(900)

CUT_S = 10
LOCKED_S = 30
NOTICED_S = 16


def passes(seconds: float) -> Callable[[], bool]:
    over = time.monotonic() + seconds
    return lambda: time.monotonic() > over


# The faults. Each ends with ``thaw``, as soon as what shall meet the jobs in their states has met them.


def kill_controller(scene: Scene) -> None:
    scene.kill_actor("rc-controller")
    scene.thaw()


def kill_archive(scene: Scene) -> None:
    scene.kill_actor("rc-archive")
    scene.thaw()


def kill_node_actor(scene: Scene) -> None:
    name = f"rc-node:{scene.node_id(VICTIM)}"
    scene.kill_until_renewed(name)
    scene.thaw()


def cut_for_10_s(scene: Scene) -> None:
    scene.hosts.cut(VICTIM)
    wait_until(passes(CUT_S), 2 * CUT_S)
    scene.hosts.mend(VICTIM)
    scene.thaw()
    wait_until(passes(NOTICED_S), 2 * NOTICED_S)


def lock_store(scene: Scene) -> None:
    with sqlite3.connect(scene.cluster.home / "store.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        scene.thaw()
        wait_until(passes(LOCKED_S), 2 * LOCKED_S)
        other.execute("ROLLBACK")
    other.close()


def fill_disk(scene: Scene) -> None:
    filler = fill(scene.cluster.home, leave=0)
    try:
        scene.thaw()
        scene.submit_until_refused()
        scene.jobs["running"].goes_on()
    finally:
        filler.unlink()


def kill_gcs(scene: Scene) -> None:
    (gcs,) = [one for pid in scene.hosts.pids(HEAD) if (one := psutil.Process(pid)).name() == "gcs_server"]
    command, environment = gcs.cmdline(), gcs.environ()
    gcs.kill()
    gcs.wait(30)  # else the next one may find the tables locked
    scene.hosts.popen(HEAD, command, env=environment, stdout=None, stderr=None)
    scene.thaw()


def kill_instance_actors(scene: Scene) -> None:
    for state in ("running", "starting", "preparing", "stopping"):
        scene.kill_actor(f"{scene.jobs[state].id}.0:{scene.victims[state]}")
    scene.thaw()


def kill_supervisors(scene: Scene) -> None:
    for state in ("running", "stopping"):
        pid = str(scene.jobs[state].pids[scene.victims[state]])
        parent = scene.hosts.run(VICTIM, ["ps", "-o", "ppid=", "-p", pid], check=True).stdout
        scene.kill(VICTIM, int(parent))
    scene.thaw()


def kill_ranks(scene: Scene) -> None:
    for state in ("running", "stopping"):
        rank = scene.jobs[state].folder / f"rank.{scene.victims[state]}"
        scene.kill(VICTIM, int(rank.read_text()))
    scene.thaw()


def raylet(scene: Scene) -> int:
    return int(scene.hosts.run(VICTIM, ["pgrep", "-f", "-o", "raylet/raylet"], check=True).stdout)


def kill_raylet(scene: Scene) -> None:
    scene.kill(VICTIM, raylet(scene))
    scene.thaw()


def stop_raylet(scene: Scene) -> None:
    """Ray gives the node up, though it lives and nothing is cut; its instances have to end by themselves."""
    scene.hosts.run(VICTIM, ["kill", "-STOP", str(raylet(scene))], check=True)
    scene.thaw()


def crash(scene: Scene) -> None:
    scene.hosts.kill(VICTIM)
    scene.thaw()


def cut_power(scene: Scene) -> None:
    scene.hosts.cut(VICTIM)
    scene.hosts.kill(VICTIM)
    scene.thaw()


def cut_for_good(scene: Scene) -> None:
    scene.hosts.cut(VICTIM)
    scene.thaw()


# What must come of them.


@dataclass(frozen=True)
class Kind:
    """A fault, and the reason for which it ends the first attempt of a job in these states. The others do not notice it.

    ``says`` is part of what is said of these attempts. After some faults a host has to be started again.
    """

    upset: Callable[[Scene], None]
    ends: Mapping[str, str] = field(default_factory=dict)
    says: str = ""
    breaks_host: bool = False


LOST = dict.fromkeys(("preparing", "starting", "running"), "INSTANCE_LOST")
KINDS = {
    "the controller is killed": Kind(kill_controller),
    "the archive is killed": Kind(kill_archive),
    "a node's actor is killed": Kind(kill_node_actor),
    "a cable is out for 10 s": Kind(cut_for_10_s),
    "the store is locked for 30 s": Kind(lock_store),
    "the head's disk is full": Kind(fill_disk),
    "the GCS is killed and started again": Kind(kill_gcs),
    "an instance's actor is killed": Kind(kill_instance_actors, LOST, "its actor died"),
    "a supervisor is killed": Kind(
        kill_supervisors, {"running": "INSTANCE_LOST"}, "its supervisor was killed"
    ),
    "a rank is killed": Kind(kill_ranks, {"running": "INSTANCE_FAILED"}, "exited 137"),
    "a raylet is killed": Kind(kill_raylet, LOST, breaks_host=True),
    "a raylet hangs": Kind(stop_raylet, LOST, breaks_host=True),
    "a host crashes": Kind(crash, LOST, breaks_host=True),
    "a host loses power": Kind(cut_power, LOST, breaks_host=True),
    "a cable is out for good": Kind(cut_for_good, LOST, breaks_host=True),
}


@contextmanager
def on_stage(scene: Scene, **how: bool) -> Iterator[None]:
    try:
        scene.begin(**how)
        yield
        scene.end()
    finally:
        scene.stop_all()
    nothing_is_left(scene.cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_meets_jobs_in_every_state(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    fault, scene = KINDS[kind], Scene(cluster, tmp_path)
    with on_stage(scene):
        began = time.time()
        try:
            fault.upset(scene)
            scene.come_to_their_ends(fault.ends, fault.says)
            if kind == "a cable is out for good":
                the_fence_fell(scene, began)
        finally:
            if fault.breaks_host:
                scene.revive_victim()


def the_fence_fell(scene: Scene, cut_at: float) -> None:
    """The host itself went on, and with it the attempt, until its fence fell; only then the next one began."""
    for state in ("running", "stopping"):
        job = scene.jobs[state]
        (there,) = [one for one in job.beats() if (one.attempt, one.instance) == (0, scene.victims[state])]
        assert FENCE_S - 10 < there.times[-1] - cut_at < FENCE_S + 15
    sleeping = lambda: scene.hosts.run(VICTIM, ["pgrep", "-x", "sleep"]).stdout.split()  # noqa: E731
    wait_until(lambda: not sleeping(), 30, "nothing of the jobs is left on the host")


def test_the_submitting_commands_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    scene = Scene(cluster, tmp_path)
    with on_stage(scene, attached=True):
        scene.kill_submitters()
        scene.thaw()
        scene.come_to_their_ends({})


def test_the_server_is_killed_through_which_they_were_submitted(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.popen(HEAD, "serve", "--port", "8787", "--json", stderr=None)
    assert server.stdout is not None and server.stdout.readline()
    token = (cluster.home / "serve.token").read_text().strip()
    scene = Scene(cluster, tmp_path, {"RAYCONTROL_URL": "http://127.0.0.1:8787", "RAYCONTROL_TOKEN": token})
    with on_stage(scene):
        server.end()
        server.stdout.close()
        scene.thaw()
        scene.come_to_their_ends({})


def test_a_new_head_of_the_same_name_takes_the_store_over(headless: Cluster, tmp_path: Path) -> None:
    """It is there, and has room for the next attempts, before the hosts of the old Ray have noticed that theirs is gone."""
    scene, hosts = Scene(headless, tmp_path), headless.hosts
    with on_stage(scene, beside=False):
        headless.close()
        hosts.kill(HEAD)
        scene.thaw()
        hosts.boot(HEAD)
        hosts.start_ray(HEAD, gpus=1)
        for _ in range(2):
            hosts.start_ray(hosts.add(), gpus=6)
        headless.raycontrol(HEAD, "controller", "restart", check=True, timeout_s=STARTED_S)
        scene.come_to_their_ends(LOST, blames_victim=False)
