"""Six jobs, one in each state that a job can be in before its end, where faults are to happen; and what must hold then.

Every instance tells every 0.2 s that it runs. These beats go to a folder that all hosts share and that no network cut
reaches, so that a job that ran twice at once would be seen.

Whom a fault meets are the processes of host ``VICTIM``. What holds a job in its state is a stopped process (SIGSTOP) on
another host, or the job's own instance there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycontrol.status import JobInfo, JobState
from raycontrol.storereader import StoreReader
from tests.hosts.conftest import Cluster
from tests.hosts.network import HostProcess
from tests.support import wait_until

HEAD, STEADY, VICTIM, SPARE = 0, 1, 2, 3
GPUS = {HEAD: 8, STEADY: 4, VICTIM: 5, SPARE: 6}
"""By Ray's count. Only the job beside fits on the head, and only the blocker and the next attempts on SPARE."""

STARTED_S = 120
ENDED_S = 240
SUBMITS = 200

# A start command with a child, the rank, and a daemon in a session of its own.
BEATS = """
setsid sh -c 'sleep 600 &'
{trap}
exec 3>> {folder}/$RAYCONTROL_ATTEMPT.$RAYCONTROL_INSTANCE.$$
rank() {{ while echo beat; date +%s.%N >&3; [ ! -e {folder}/go ]; do sleep 0.2; done; }}
rank & echo $! > {folder}/rank.$RAYCONTROL_INSTANCE
wait $!
"""
OBEYS = ""
IGNORES = "trap '' TERM"


@dataclass
class Beats:
    """What one process of an instance has told: of which attempt it is, and when it ran."""

    attempt: int
    instance: str
    pid: int
    times: list[float]


@dataclass
class Job:
    """One job of the scene, with its folder. ``pids`` are those of the start commands before the fault, by instance."""

    cluster: Cluster
    reader: StoreReader
    folder: Path
    id: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    def command(self, trap: str = OBEYS) -> str:
        return BEATS.format(folder=self.folder, trap=trap)

    def info(self) -> dict[str, Any]:
        """As the store has it on the disk: what is true whoever has been killed."""
        return self.reader.info(self.id).model_dump(mode="json")

    def beats(self) -> list[Beats]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*")):
            attempt, instance, pid = path.name.split(".")
            times = [float(line) for line in path.read_text().splitlines()]
            found.append(Beats(int(attempt), instance, int(pid), times))
        return found

    def runs(self, attempt: int = 0) -> dict[str, int]:
        """The pids of the start commands, once both instances of the attempt (the one beside has one) have told of themselves."""
        found = {one.instance: one.pid for one in self.beats() if one.attempt == attempt and one.times}
        return found if len(found) == len(self.info()["instances"]) else {}

    def is_in(self, state: str) -> bool:
        found = self.info()["state"]
        assert found not in ("SUCCEEDED", "FAILED", "STOPPED"), json.dumps(self.info(), indent=1)
        return bool(found == state)

    def goes_on(self) -> None:
        """Wait for new beats of all that run."""
        before = {(one.attempt, one.instance): len(one.times) for one in self.beats()}
        attempt = max(attempt for attempt, _ in before)

        def more() -> bool:
            now = {(one.attempt, one.instance): len(one.times) for one in self.beats()}
            return all(now[key] > count + 3 for key, count in before.items() if key[0] == attempt)

        wait_until(more, 20, f"{self.id} goes on")

    def let_go(self) -> None:
        """Let the program end, in whatever attempt it is."""
        (self.folder / "go").touch()

    def ended(self) -> dict[str, Any]:
        """The job when it has ended, which is for ever."""
        waited = self.cluster.raycontrol(HEAD, "wait", self.id, timeout_s=ENDED_S)
        info = self.info()
        assert waited.returncode in (0, 130), json.dumps(info, indent=1)
        return info

    def instance_on(self, i: int) -> str:
        """The name of its instance on host ``i``."""
        name = self.cluster.hosts.name(i)
        return str(next(item["name"] for item in self.info()["instances"] if item["node"] == name))

    def has_prepared(self, instance: str) -> bool:
        states = {item["name"]: item["state"] for item in self.info()["instances"]}
        return bool(states.get(instance) == "PREPARED")

    def ran_once(self) -> None:
        """No instance was started twice, and no two attempts ran at once."""
        beats = self.beats()
        last_attempt = self.info()["attempt"]
        started = [(one.attempt, one.instance) for one in beats]
        assert len(started) == len(set(started)), f"{self.id}: started twice: {sorted(started)}"
        for number in range(1, last_attempt + 1):
            earlier = [time for one in beats if one.attempt < number for time in one.times]
            later = [time for one in beats if one.attempt == number for time in one.times]
            if earlier and later:
                early_s = max(earlier) - min(later)
                assert early_s < 0, (
                    f"{self.id}.{number} began {early_s:.1f} s before the one before had ended"
                )

    def has_every_line(self) -> None:
        """The archive has all that the last attempt wrote."""
        attempt = self.info()["attempt"]
        told = self.cluster.raycontrol(HEAD, "logs", self.id, check=True, timeout_s=60).stdout.splitlines()
        assert told.count("master-0 | beat") + told.count("worker-0 | beat") == sum(
            len(one.times) for one in self.beats() if one.attempt == attempt
        ), self.id


class Scene:
    """``jobs`` by their state, on two of the hosts 1 to 3 each; ``beside`` is on the head; ``done`` has ended already."""

    def __init__(self, cluster: Cluster, folder: Path, address: Mapping[str, str] | None = None) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.jobs: dict[str, Job] = {}
        self.beside: Job | None = None
        self.done: JobInfo | None = None
        self.victims: dict[str, str] = {}  # by state: the instance on VICTIM
        self._reader = StoreReader(cluster.home)
        self._folder = folder
        self._env = dict(address or {})  # where jobs are submitted to
        self._small: list[str] = []  # jobs that nothing holds in a state
        self._stopped: list[tuple[int, int]] = []
        self._attached: list[HostProcess] | None = None

    # Putting the jobs into their states.

    def begin(self, *, beside: bool = True, attached: bool = False) -> None:
        """``attached``: jobs are submitted by commands that go on to show their logs."""
        done = self._submit("--cpu", "0.1", "--", "true")
        self.cluster.raycontrol(HEAD, "wait", done, timeout_s=STARTED_S, check=True)
        self.done = self._reader.info(done)
        if beside:
            self.beside = self._new_job("beside")
            self.beside.id = self._submit(
                "--gpu", str(GPUS[HEAD]), "--cpu", "0.1", "--", self.beside.command()
            )
            self.beside.pids = wait_until(self.beside.runs, STARTED_S, "the job beside runs")
        self._attached = [] if attached else None
        if not beside:
            self._block(HEAD)  # until it is lost
        blocker = self._block(SPARE)
        self._begin_running_and_stopping()
        node_actor = self._hold_starting_and_preparing()
        self._begin_queued()
        self._force([blocker])
        self._let_start(node_actor)
        self._begin_placing()

    def _block(self, i: int) -> str:
        """Take all GPUs of a host that has more of them than those that shall be used now."""
        once = ("--set", "retry.infra_max=0")
        blocker = self._submit("--cpu", "0.1", "--gpu", str(GPUS[i]), *once, "--", "sleep 600")
        wait_until(lambda: self._reader.info(blocker).state is JobState.RUNNING, STARTED_S)
        return blocker

    def _begin_running_and_stopping(self) -> None:
        running = self._begin_job("running")
        stopping = self._begin_job("stopping", trap=IGNORES)
        for job in (running, stopping):
            job.pids = wait_until(job.runs, STARTED_S, "both instances run")
        self.victims |= {"running": running.instance_on(VICTIM), "stopping": stopping.instance_on(VICTIM)}
        wait_until(lambda: running.is_in("RUNNING"), 30, "it is known to run")
        wait_until(lambda: stopping.is_in("RUNNING"), 30, "it is known to run")
        self.cluster.raycontrol(HEAD, "stop", stopping.id, check=True)
        wait_until(lambda: stopping.is_in("STOPPING"), 30, "it is being stopped")

    def _hold_starting_and_preparing(self) -> int:
        """Both are prepared on VICTIM and wait for STEADY's node actor, whose pid is returned."""
        node_actor = self.actor(f"rc-node:{self.node_id(STEADY)}")
        assert node_actor is not None
        self._stop(STEADY, node_actor["pid"])
        starting, preparing = self._begin_job("starting"), self._begin_job("preparing")
        for state in ("starting", "preparing"):
            self._prepared_on_victim(state)
        self._stop_instance(starting, VICTIM)
        self._stop_instance(preparing, STEADY)
        return int(node_actor["pid"])

    def _prepared_on_victim(self, state: str) -> None:
        job = self.jobs[state]
        wait_until(lambda: len(job.info()["instances"]) == 2, STARTED_S, f"{state}: it is placed")
        victim = self.victims[state] = job.instance_on(VICTIM)
        wait_until(lambda: job.has_prepared(victim), STARTED_S, f"{state}: {victim} has prepared itself")

    def _begin_queued(self) -> None:
        """It needs more than is free, now and when the blocker has gone."""
        queued = self._begin_job("queued", gpus=4)
        wait_until(lambda: queued.info()["pending"], 30, "it has a reason to wait")

    def _force(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            self.cluster.raycontrol(HEAD, "stop", "--force", job, check=True, timeout_s=STARTED_S)
        for job in jobs:
            self.cluster.raycontrol(HEAD, "wait", job, timeout_s=STARTED_S)

    def _let_start(self, node_actor: int) -> None:
        """Now an instance of the one on STEADY, of the other on VICTIM does not get on."""
        self._go_on(STEADY, node_actor)
        wait_until(lambda: self.jobs["starting"].is_in("STARTING"), 30, "all are prepared")
        assert self.jobs["preparing"].is_in("PREPARING")

    def _begin_placing(self) -> None:
        """It gets the nodes VICTIM and SPARE, whose raylet does not answer."""
        raylet = self.hosts.run(SPARE, ["pgrep", "-f", "-o", "raylet/raylet"], check=True).stdout
        self._stop(SPARE, int(raylet))
        placing = self._begin_job("placing")
        wait_until(lambda: placing.is_in("PLACING"), STARTED_S, "nodes are being reserved for it")

    def _begin_job(self, state: str, trap: str = OBEYS, gpus: int = 1) -> Job:
        job = self.jobs[state] = self._new_job(state)
        retry = [word for one in ("max", "infra_max") for word in ("--set", f"retry.{one}=1")]
        grace = ["--set", "timeouts.grace_s=300"] if trap == IGNORES else []
        wanted = ["--nodes", "2", "--cpu", "0.1", "--gpu", str(gpus), "--name", state]
        job.id = self._submit(*wanted, *retry, *grace, "--", job.command(trap))
        return job

    def _new_job(self, name: str) -> Job:
        folder = self.hosts.shared / f"{self._folder.name}-{name}"
        folder.mkdir()
        return Job(self.cluster, self._reader, folder)

    def _submit(self, *arguments: str) -> str:
        if self._attached is None:
            return self.cluster.raycontrol(
                HEAD, "submit", *arguments, env=self._env, check=True, timeout_s=STARTED_S
            ).stdout.strip()
        known = self._ids()
        self._attached.append(self.cluster.popen(HEAD, "run", *arguments, env=self._env))
        (new,) = wait_until(lambda: self._ids() - known, STARTED_S, "the job is submitted")
        return new

    def _ids(self) -> set[str]:
        return {info.id for info in self._reader.jobs(None, None, None)}

    # Processes.

    def _stop_instance(self, job: Job, i: int) -> None:
        name = f"{job.id}.0:{job.instance_on(i)}"
        actor = wait_until(lambda: self.actor(name), STARTED_S, f"{name} is there")
        self._stop(i, actor["pid"])

    def _stop(self, i: int, pid: int) -> None:
        self.hosts.run(i, ["kill", "-STOP", str(pid)], check=True)
        self._stopped.append((i, pid))

    def _go_on(self, i: int, pid: int) -> None:
        self._stopped.remove((i, pid))
        if self.hosts.up(i):
            self.hosts.run(i, ["kill", "-CONT", str(pid)])

    def thaw(self) -> None:
        """Let all go on that was stopped to hold the jobs in their states, where it still lives."""
        for i, pid in self._stopped[:]:
            self._go_on(i, pid)

    def kill(self, i: int, pid: int) -> None:
        self.hosts.run(i, ["kill", "-9", str(pid)], check=True)

    def actor(self, name: str) -> Mapping[str, Any] | None:
        """The living actor whose name begins or ends so."""
        living = [one for one in self.cluster.ask()["actors"] if one["state"] == "ALIVE"]
        return next(
            (one for one in living if one["name"].startswith(name) or one["name"].endswith(name)), None
        )

    def kill_actor(self, name: str) -> None:
        actor = self.actor(name)
        assert actor is not None, name
        self.kill(next(i for i in range(self.hosts.count) if self.hosts.ip(i) == actor["ip"]), actor["pid"])

    def kill_until_renewed(self, name: str) -> None:
        before = self.actor(name)
        assert before is not None, name
        self.kill_actor(name)
        wait_until(lambda: self._is_renewed(name, before), 60, f"{name} is there again")

    def _is_renewed(self, name: str, before: Mapping[str, Any]) -> bool:
        now = self.actor(name)
        return now is not None and now["pid"] != before["pid"]

    def node_id(self, i: int) -> str:
        ip = self.hosts.ip(i)
        return str(next(one["id"] for one in self.cluster.ask()["nodes"] if one["ip"] == ip))

    def revive_victim(self) -> None:
        """Start the host again, with Ray."""
        if self.hosts.up(VICTIM):
            self.hosts.kill(VICTIM)
        self.hosts.mend(VICTIM)
        self.hosts.boot(VICTIM)
        self.hosts.start_ray(VICTIM)
        wait_until(lambda: self.actor(f"rc-node:{self.node_id(VICTIM)}"), 60, "its node actor is there")

    def kill_submitters(self) -> None:
        assert self._attached
        for command in self._attached:
            command.kill()
            command.communicate()

    def submit_until_refused(self) -> None:
        """The store may have room for some more, in the space that its file has already."""
        for _ in range(SUBMITS):
            told = self.cluster.raycontrol(HEAD, "submit", "--cpu", "0.1", "--", "true", timeout_s=STARTED_S)
            if told.returncode != 0:
                assert told.returncode == 125 and "free some space" in told.stderr, told.stderr
                return
            self._small.append(told.stdout.strip())
        raise AssertionError("a full disk took everything")

    # What must be true.

    def come_to_their_ends(
        self, ends: Mapping[str, str], says: str = "", blames_victim: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Let every job end, as it must after a fault that ended the first attempts in these states for these reasons.

        Those that had begun are let go when all of them are in the attempt that they must end in: what still ran of an
        earlier one somewhere would be seen. The two that waited are let go at once: where they come first, they leave the
        room to those others. Returns the jobs.
        """
        for state in ("queued", "placing"):
            self.jobs[state].let_go()
        begun = ("running", "starting", "preparing")
        for state in begun:
            self._runs_in(state, int(state in ends))
        for state in (*begun, "stopping"):
            self.jobs[state].let_go()
        infos = {state: self.jobs[state].ended() for state in self.jobs}
        for state, info in infos.items():
            self._ended_well(state, info, ends, says)
            if blames_victim and state in ends:
                assert info["attempts"][0]["summary"].startswith(self.victims[state]), info["attempts"][0]
            self.jobs[state].ran_once()
            if state != "stopping" or not ends:  # what a lost instance wrote last is lost
                self.jobs[state].has_every_line()
        return infos

    def _runs_in(self, state: str, attempt: int) -> None:
        job = self.jobs[state]
        wait_until(lambda: job.runs(attempt), ENDED_S, f"{state}: attempt {attempt} runs")
        job.goes_on()

    def _ended_well(self, state: str, info: dict[str, Any], ends: Mapping[str, str], says: str) -> None:
        told, reason = json.dumps(info, indent=1), ends.get(state)
        reasons = [attempt["reason"] for attempt in info["attempts"]]
        if state == "stopping":
            assert (info["state"], reasons) == ("STOPPED", ["STOP_REQUESTED"]), told
        elif reason is not None:
            assert (info["state"], reasons) == ("SUCCEEDED", [reason, "COMPLETED"]), told
            assert says in info["attempts"][0]["summary"], told
        elif (
            state == "placing" and ends and len(reasons) == 2
        ):  # all of it had been reserved a moment before the fault
            assert (info["state"], reasons) == ("SUCCEEDED", ["INSTANCE_LOST", "COMPLETED"]), told
        else:
            assert (info["state"], reasons) == ("SUCCEEDED", ["COMPLETED"]), told
            pids = self.jobs[state].pids
            assert not pids or self.jobs[state].runs() == pids

    def stop_all(self) -> None:
        """After a test that failed: end what is left of its jobs, and show what happened to all of them."""
        self.thaw()
        for job in self.jobs.values():
            for event in self._reader.events(job.id, 0, 0) if job.id else ():
                print(f"{event.at:.1f} {job.id} {event.state} {event.kind} {event.message}")
        jobs = [*self.jobs.values(), *([self.beside] if self.beside else [])]
        self._force([job.id for job in jobs if job.id and not self._reader.info(job.id).state.terminal])

    def end(self) -> None:
        """What holds after every fault for those whom it does not concern."""
        assert self.done is not None and self._reader.info(self.done.id) == self.done
        for job in self._small:
            self.cluster.raycontrol(HEAD, "wait", job, timeout_s=STARTED_S, check=True)
        if self.beside is not None:
            self._beside_ran_on(self.beside)
            shutil.rmtree(self.beside.folder)
        for job in self.jobs.values():
            shutil.rmtree(job.folder)

    def _beside_ran_on(self, beside: Job) -> None:
        info = beside.info()
        assert (info["state"], info["attempt"]) == ("RUNNING", 0)
        assert beside.runs() == beside.pids
        beside.goes_on()
        beside.let_go()
        assert beside.ended()["state"] == "SUCCEEDED"
