"""Jobs that tell every 0.2 s that they run, where faults are to happen, and what must hold afterwards.

Their beats go to a folder that all hosts share and that no network cut reaches, so that a job that ran twice at once
would be seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.conftest import Cluster
from tests.support import wait_until

STARTED_S = 120
ENDED_S = 240

# A start command with a child, the rank, and a daemon in a session of its own.
BEATS = """
exec 3>> {folder}/$RAYCONTROL_ATTEMPT.$RAYCONTROL_INSTANCE.$$
setsid sh -c 'sleep 600 &'
rank() {{ until [ -e {folder}/go ]; do echo beat; date +%s.%N >&3; sleep 0.2; done; }}
rank & echo $! > {folder}/rank.$RAYCONTROL_INSTANCE
wait $!
"""


@dataclass
class Beats:
    """What one process of an instance has told: of which attempt it is, and when it ran."""

    attempt: int
    instance: str
    pid: int
    times: list[float]


@dataclass
class Job:
    """One job of the scene, with its folder."""

    cluster: Cluster
    folder: Path
    id: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return BEATS.format(folder=self.folder)

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.json(0, "get", self.id, timeout_s=STARTED_S)
        return found

    def beats(self) -> list[Beats]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*")):
            attempt, instance, pid = path.name.split(".")
            times = [float(line) for line in path.read_text().splitlines()]
            found.append(Beats(int(attempt), instance, int(pid), times))
        return found

    def runs(self, attempt: int = 0) -> dict[str, int]:
        """The pids of the start commands, once all instances of the attempt have told of themselves."""
        found = {one.instance: one.pid for one in self.beats() if one.attempt == attempt and one.times}
        return found if len(found) == len(self.info()["instances"]) else {}

    def goes_on(self) -> None:
        """Wait for new beats of all that run."""
        before = {(one.attempt, one.instance): len(one.times) for one in self.beats()}
        attempt = max(attempt for attempt, _ in before)

        def more() -> bool:
            now = {(one.attempt, one.instance): len(one.times) for one in self.beats()}
            return all(now[key] > count + 3 for key, count in before.items() if key[0] == attempt)

        wait_until(more, 20, f"{self.id} goes on")

    def let_go(self) -> dict[str, Any]:
        """Let the program end; return the job as it ends, which is for ever."""
        (self.folder / "go").touch()
        waited = self.cluster.raycontrol(0, "wait", self.id, timeout_s=ENDED_S)
        info = self.info()
        assert waited.returncode == 0, json.dumps(info, indent=1)
        return info


class Scene:
    """``job`` runs on two of the hosts 1 to 3, ``beside`` on the head; ``ended`` is a job that has ended already."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.job = Job(cluster, self._folder(folder, "job"))
        self.beside = Job(cluster, self._folder(folder, "beside"))
        self.ended: dict[str, Any] = {}

    def _folder(self, folder: Path, name: str) -> Path:
        made = self.hosts.shared / f"{folder.name}-{name}"
        made.mkdir()
        return made

    def begin(self) -> None:
        done = self.submit("--cpu", "0.1", "--", "true")
        self.cluster.raycontrol(0, "wait", done, timeout_s=STARTED_S, check=True)
        self.ended = self.cluster.json(0, "get", done)
        self.beside.id = self.submit("--gpu", "4", "--name", "beside", "--", self.beside.command)
        self.beside.pids = wait_until(self.beside.runs, STARTED_S, "the job beside runs")
        self.begin_job()

    def begin_job(self) -> None:
        self.job.id = self.submit(*self.arguments)
        self.job.pids = wait_until(self.job.runs, STARTED_S, "the job runs")
        wait_until(lambda: self.job.info()["state"] == "RUNNING", 30, "both are known to run")

    @property
    def arguments(self) -> list[str]:
        """The job, as it is submitted."""
        retry = [word for one in ("max", "infra_max") for word in ("--set", f"retry.{one}=1")]
        return ["--nodes", "2", "--gpu", "2", "--name", "job", *retry, "--", self.job.command]

    def submit(self, *arguments: str) -> str:
        return self.cluster.raycontrol(
            0, "submit", *arguments, check=True, timeout_s=STARTED_S
        ).stdout.strip()

    def end(self) -> None:
        """What holds after every fault for those whom it does not concern."""
        info = self.beside.info()
        assert (info["state"], info["attempt"]) == ("RUNNING", 0)
        assert self.beside.runs() == self.beside.pids
        self.beside.goes_on()
        self.beside.let_go()
        assert self.cluster.json(0, "get", self.ended["id"]) == self.ended
        for job in (self.job, self.beside):
            shutil.rmtree(job.folder)

    # Where things are.

    def host_of(self, instance: str) -> int:
        """The number of the host on which an instance runs."""
        item = next(item for item in self.job.info()["instances"] if item["name"] == instance)
        return next(i for i in range(self.hosts.count) if self.hosts.name(i) == item["node"])

    def actor(self, name: str) -> Mapping[str, Any] | None:
        """The living actor whose name begins or ends so."""
        living = [one for one in self.cluster.ask()["actors"] if one["state"] == "ALIVE"]
        return next(
            (one for one in living if one["name"].startswith(name) or one["name"].endswith(name)), None
        )

    def kill(self, i: int, pid: int) -> None:
        self.hosts.run(i, ["kill", "-9", str(pid)], check=True)

    def kill_actor(self, name: str) -> None:
        actor = self.actor(name)
        assert actor is not None
        self.kill(next(i for i in range(self.hosts.count) if self.hosts.ip(i) == actor["ip"]), actor["pid"])

    def is_renewed(self, name: str, before: Mapping[str, Any]) -> bool:
        now = self.actor(name)
        return now is not None and (now["pid"], now["id"]) != (before["pid"], "")

    # What must be true.

    def is_not_disturbed(self) -> None:
        """The job has run on in its first attempt, and succeeds with all that it wrote."""
        self.job.goes_on()
        info = self.job.let_go()
        assert (info["state"], info["attempt"]) == ("SUCCEEDED", 0)
        assert self.job.runs() == self.job.pids
        self._runs_once(1)

    def is_tried_again(self, reason: str, victim: str, says: str = "") -> dict[str, Any]:
        """The job is in its second attempt, for this reason, and succeeds in it. Returns the first one."""
        wait_until(lambda: self.job.runs(1), ENDED_S, "the second attempt runs")
        info = self.job.let_go()
        first, second = info["attempts"]
        assert (info["state"], info["attempt"], second["outcome"]) == ("SUCCEEDED", 1, "SUCCEEDED")
        assert (first["reason"], first["summary"].startswith(victim)) == (reason, True), first
        assert says in first["summary"]
        self._runs_once(2)
        return dict(first)

    def _runs_once(self, attempts: int) -> None:
        """No instance was started twice, no two attempts ran at once, and the archive has every line of the last."""
        beats = self.job.beats()
        assert len(beats) == attempts * len(self.job.pids)
        for number in range(1, attempts):
            last = max(time for one in beats if one.attempt < number for time in one.times)
            first = min(time for one in beats if one.attempt == number for time in one.times)
            assert last < first, (
                f"attempt {number} began {last - first:.1f} s before the one before had ended"
            )
        told = self.cluster.raycontrol(0, "logs", self.job.id, check=True, timeout_s=60).stdout.splitlines()
        assert told.count("master-0 | beat") + told.count("worker-0 | beat") == sum(
            len(one.times) for one in beats if one.attempt == attempts - 1
        )
