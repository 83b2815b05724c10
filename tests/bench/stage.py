"""Four hosts with Ray for benches that break them: jobs, who runs of them, and a client that stays connected.

The head has no GPU by Ray's count, the others have two each: a job that asks for GPUs is never on the head.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.tables import expect
from tests.cluster_state import LASTING_ACTORS, RESERVABLE, attempt_of, owner_of
from tests.hosts.conftest import Cluster
from tests.hosts.network import HostProcess, Hosts
from tests.support import wait_until

HOSTS, GPUS = 4, 2
PATIENCE = {"RAY_raylet_start_wait_time_s": "120"}
"""Of `ray start`, which gives up after 30 s otherwise: four hosts on a busy machine take longer."""
ENDED_S = 120
SETTLED_S = 120

# One JSON answer on stdout for each JSON line on stdin. It connects with the first question.
CLIENT = """
import json, sys, time
import ray, raycontrol.cluster, raycontrol.readers
from raycontrol import Client, JobSpec

def submit(spec): return client.submit(JobSpec.from_dict(spec)).id
def info(job): return client.job(job).info().model_dump(mode="json")
def stop(job): client.job(job).stop(force=True)
def wait(job, timeout_s): client.job(job).wait(timeout_s=timeout_s)
def event(job, attempt, states, timeout_s):
    deadline = time.time() + timeout_s
    while time.time() < deadline:
        for one in client.job(job).events():
            if one.attempt >= attempt and one.state.value in states:
                return one.model_dump(mode="json")
        time.sleep(0.1)
def events(job): return [one.model_dump(mode="json") for one in client.job(job).events()]

answers, sys.stdout = sys.stdout, sys.stderr  # Ray may print something
client = Client()
print("ready", file=answers, flush=True)
for line in sys.stdin:
    verb, *arguments = json.loads(line)
    print(json.dumps(globals()[verb](*arguments)), file=answers, flush=True)
client.close()
"""

# One rank with a child, and a daemon in a session of its own whose parent has ended. It tells every 0.1 s that it runs.
GANG = """
exec 3>> {folder}/$RAYCONTROL_ATTEMPT.$RAYCONTROL_INSTANCE
(setsid sh -c 'sleep 600 &' &)
until [ -e {folder}/fail.$RAYCONTROL_INSTANCE ]; do date +%s.%N >&3; sleep 0.1; done
date +%s.%N > {folder}/failed
exit 1
"""


class Asker:
    """A client in a process of its own on the head, which has imported everything and connects when it is first asked."""

    def __init__(self, cluster: Cluster) -> None:
        self._log = cluster.hosts.shared / "clients.log"
        with self._log.open("a") as log:
            self._process: HostProcess = cluster.hosts.popen(
                0, [sys.executable, "-c", CLIENT], env=cluster.env, stdin=subprocess.PIPE, stderr=log
            )
        expect(self._process, "ready")

    def ask(self, verb: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended when asked to {verb} {arguments}: {self._log.read_text()[-4000:]}"
        return json.loads(line)

    def close(self) -> None:
        self._process.end()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Stage:
    """The hosts, and the jobs that were begun on them since they were last cleared."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.client = Asker(cluster)
        self.begun: dict[str, float] = {}
        """When each was submitted."""
        self.past: list[str] = []
        """Those that have been cleared away."""

    def close(self) -> None:
        self.client.close()

    def submit(self, **spec: Any) -> str:
        at = time.time()
        job: str = self.client.ask("submit", spec)
        self.take_on(job, at)
        return job

    def take_on(self, job: str, at: float) -> None:
        """Have a job ended that somebody else has submitted."""
        self.begun[job] = at

    def entered(self, job: str, *states: str, attempt: int = 0, within_s: float = ENDED_S) -> float:
        """Wait for the first stored event that has the job in one of these states; return when it was."""
        event = self.client.ask("event", job, attempt, states, within_s)
        assert event is not None, f"{job} was in none of {states} within {within_s:g} s: {self.story(job)}"
        return float(event["at"])

    def story(self, job: str) -> str:
        events = self.client.ask("events", job)
        first = events[0]["at"]
        return job + "".join(
            f"\n{one['at'] - first:8.2f} {one['attempt']} {one['state']:<10} {one['message']}"
            for one in events
        )

    def clear(self, broken: int | None = None) -> None:
        """End all jobs that were begun, start a broken host anew, and wait until the cluster is as it was."""
        for job in self.begun:
            self.client.ask("stop", job)
        if broken is not None:
            self._renew(broken)
        for job in self.begun:
            self.client.ask("wait", job, ENDED_S)
        self.past += self.begun
        self.begun.clear()
        wait_until(self._is_settled, SETTLED_S, "the cluster is as it was")

    def _renew(self, i: int) -> None:
        self.hosts.mend(i)
        if self.hosts.up(i):
            self.hosts.kill(i)
        ip = self.hosts.ip(i)
        wait_until(
            lambda: all(node["ip"] != ip for node in self.cluster.ask()["nodes"]),
            SETTLED_S,
            f"Ray has given host {i} up",
        )
        self.hosts.boot(i)
        self.hosts.start_ray(i)

    def _is_settled(self) -> bool:
        state = self.cluster.ask()
        actors = [actor["name"] for actor in state["actors"] if actor["state"] == "ALIVE"]
        free = all(
            node["available"].get(name, 0) == node["total"].get(name, 0)
            for node in state["nodes"]
            for name in RESERVABLE
        )
        serving = sum(name.startswith("rc-node:") for name in actors)
        passing = [one for one in state["actors"] if not one["name"].startswith(LASTING_ACTORS)]
        return free and not passing and len(state["nodes"]) == serving == HOSTS

    # Where things are, and how they end.

    def host_at(self, ip: str) -> int:
        return next(i for i in range(HOSTS) if self.hosts.ip(i) == ip)

    def host_of(self, job: str, index: int) -> int:
        return self.host_at(self.client.ask("info", job)["instances"][index]["ip"])

    def kill_actor(self, name: str) -> float:
        """Kill the process of the actor whose name ends so; return when."""
        (actor,) = [one for one in self.cluster.ask()["actors"] if one["name"].endswith(name)]
        command = f"date +%s.%N; kill -9 {actor['pid']}"
        return float(self.hosts.run(self.host_at(actor["ip"]), ["bash", "-c", command], check=True).stdout)

    def processes(self, job: str, hosts: Sequence[int]) -> set[int]:
        marked = {pid: attempt_of(pid) or "" for i in hosts for pid in self.hosts.pids(i)}
        return {pid for pid, attempt in marked.items() if attempt.startswith(f"{job}.")}

    def gone(self, job: str, hosts: Sequence[int], pids: set[int]) -> float:
        """Wait until none of ``pids``, and then no other process of the job, is left on the hosts; return when it was so."""
        wait_until(lambda: all(owner_of(pid) is None for pid in pids), ENDED_S, f"{job} is gone")
        at = time.time()
        left = self.processes(job, hosts)
        return self.gone(job, hosts, left) if left else at


class Gang:
    """A job of two instances with two GPUs each, running on two hosts. ``victim`` is the host of ``worker-0``."""

    def __init__(self, stage: Stage, *, retries: int = 0) -> None:
        self._stage = stage
        number = len(list(stage.hosts.shared.glob("gang-*")))
        self.folder = stage.hosts.shared / f"gang-{number}"
        self.folder.mkdir()
        self.id = stage.submit(
            name="gang",
            command=GANG.format(folder=self.folder),
            nodes=2,
            resources={"gpu": GPUS},
            retry={"infra_max": retries},
        )
        stage.entered(self.id, "RUNNING")
        self.victim = stage.host_of(self.id, 1)
        self.places = [stage.host_of(self.id, 0), self.victim]
        self.beat(0)

    def beat(self, attempt: int) -> None:
        """Wait until both instances have told that they run."""
        wait_until(lambda: len(self.beats(attempt)) == 2, ENDED_S, f"attempt {attempt} of {self.id} runs")

    def beats(self, attempt: int) -> dict[str, list[float]]:
        """When each instance that has told of itself ran."""
        found = {path.name: path.read_text().splitlines() for path in self.folder.glob(f"{attempt}.*")}
        return {name: [float(line) for line in lines] for name, lines in found.items() if lines}

    def processes(self, hosts: Sequence[int]) -> set[int]:
        """The job's processes on these of its hosts: on each a rank and the daemon at least."""
        found = self._stage.processes(self.id, hosts)
        assert len(found) >= 2 * len(hosts), found
        return found

    def fail(self) -> None:
        """Let ``worker-0`` exit 1."""
        (self.folder / "fail.worker-0").touch()

    def failed_at(self) -> float:
        told = self.folder / "failed"
        return float(wait_until(lambda: told.exists() and told.read_text(), ENDED_S, "worker-0 has failed"))


@contextmanager
def stage(home: Path) -> Iterator[Stage]:
    """``home`` is an empty folder for RAYCONTROL_HOME."""
    with Hosts(HOSTS, keep=[home]) as hosts:
        for i in range(HOSTS):
            hosts.start_ray(i, gpus=GPUS if i else 0, env=PATIENCE)
        cluster = Cluster(hosts, home)
        made = Stage(cluster)
        made.entered(made.submit(command="true"), "SUCCEEDED")  # it starts the controller
        made.clear()
        yield made
        made.close()
        cluster.close()
