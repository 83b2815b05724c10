"""Simulated gangs of instances on simulated nodes, under whatever clock: the other side of the controller's protocol.

An instance here does what ``raycontrol.instance`` does as the controller sees it (orders may come twice, reports are
kept until they are acknowledged), and what its start command does is a :class:`Program`. Everything that must never
happen is written down in ``Gangs.faults`` when it happens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from raycontrol import backends
from raycontrol.duties import InstanceGone, ReservationRefused
from raycontrol.events import (
    InstanceClosed,
    InstanceFailed,
    InstancePrepared,
    Report,
    RunExited,
    RunsGone,
    StagePassed,
)
from raycontrol.job import FENCE_S, Ended, Job
from raycontrol.placement import Assignment, Node, place, reserve
from raycontrol.plan import Facts
from raycontrol.spec import Member, members
from raycontrol.status import Reason

NOTICED_S = 16.0
"""How long Ray needs to give up a host that says nothing."""


@dataclass(frozen=True)
class Program:
    """What an instance and its start command do: run ``seconds`` (None: until stopped), then exit with ``code``.

    ``silent``: says nothing, neither prepared nor started. ``unready``: cannot prepare, and says so. ``deaf``: ends by SIGKILL only.
    ``hung``: does not end at all, as on a host that does not answer. ``heals``: from that attempt on it exits 0.
    """

    seconds: float | None = 10.0
    code: int = 0
    silent: bool = False
    unready: bool = False
    deaf: bool = False
    hung: bool = False
    heals: int | None = None


TRAINING = Program()


def nodes(*names: str, cpu: float = 4, gpu: float = 0) -> tuple[Node, ...]:
    """Empty nodes of these names; ``host-a`` has the id ``id-of-host-a``."""
    total = {"CPU": cpu, "GPU": gpu}
    return tuple(
        Node(f"id-of-{name}", name, f"10.0.0.{number}", total, total)
        for number, name in enumerate(names, start=1)
    )


class FakeInstance:
    """One instance of one reservation."""

    def __init__(self, gangs: Gangs, job: Job, member: Member, node_id: str, ip: str) -> None:
        self.name = member.name
        self.job_id = job.id
        self.attempt_id = job.attempt_id
        self.node_id = node_id
        self.alive = True
        self.mourned = False
        self.running = False
        self.closed = False
        self.unsent: list[Report] = []
        self.mourners: list[Callable[[], None]] = []
        self._gangs = gangs
        self._program = gangs.programs.get(member.name, TRAINING)
        if self._program.heals is not None and job.attempt >= self._program.heals:
            self._program = replace(self._program, code=0)
        leased = backends.leases(job.spec.mode, member)
        ports = {"probe": "40000", **{purpose: str(29500 + place) for place, purpose in enumerate(leased)}}
        self.facts = Facts(member.name, ip, node_id, ports)
        self._prepared: bool | None = None
        self._passed = -1
        self._begun: set[int] = set()
        self._stopping = False

    # Orders. They come when the node can be reached, or never.

    def prepare(self) -> None:
        self._when_reached(self._prepare)

    def carry_out(self, stage: int, runs: bool) -> None:
        self._when_reached(lambda: self._carry_out(stage, runs))

    def stop(self, grace_s: float, why: str) -> None:
        self._when_reached(lambda: self._stop(grace_s, why))

    def _when_reached(self, order: Callable[[], None]) -> None:
        wait_s = self._gangs.cut_for(self.node_id)
        if wait_s == 0:
            order()
        elif wait_s < math.inf:
            self._gangs.later(wait_s, lambda: order() if self.alive else None)

    def _prepare(self) -> None:
        if self._prepared:
            self._report(InstancePrepared(self._now(), self.attempt_id, self.name, self.facts))
        elif self._prepared is None:
            self._prepared = False
            self._soon(self._finish_preparing)

    def _carry_out(self, stage: int, runs: bool) -> None:
        if stage <= self._passed:
            self._report(StagePassed(self._now(), self.attempt_id, self.name, stage))
        elif stage not in self._begun:
            self._begun.add(stage)
            self._soon(lambda: self._finish_stage(stage, runs))

    def _stop(self, grace_s: float, why: str) -> None:
        if self.closed:
            self._report(InstanceClosed(self._now(), self.attempt_id, self.name))
            return
        self._stopping = True
        if self._program.hung:
            return
        if self.running and self._program.deaf and grace_s > 0:
            self._gangs.later(grace_s, lambda: self._end(signal=9, sender=f"raycontrol: {why}"))
        elif self.running:
            number = 9 if grace_s == 0 else 15
            self._soon(lambda: self._end(signal=number, sender=f"raycontrol: {why}"))
        else:
            self._soon(self._close)

    # What happens by itself.

    def die(self) -> None:
        """The instance is gone, with all that it ran and had not reported."""
        self.alive, self.running, self.unsent = False, False, []
        self.mourn()

    def mourn(self) -> None:
        """Ray says that it is dead, which it need not be."""
        self.mourned = True
        for mourn in self.mourners:
            mourn()
        self.mourners = []

    def exit(self, code: int) -> None:
        """The start command ends by itself."""
        self._end(code=code)

    def _finish_preparing(self) -> None:
        if self._stopping or self._program.silent:
            return
        if (wait_s := self._gangs.servant_away_for(self.node_id)) > 0:
            self._gangs.later(wait_s, lambda: self._finish_preparing() if self.alive else None)
            return
        if self._program.unready:
            self._report(
                InstanceFailed(
                    self._now(), self.attempt_id, self.name, Reason.PREPARE_FAILED, "no space left"
                )
            )
            return
        self._prepared = True
        self._report(InstancePrepared(self._now(), self.attempt_id, self.name, self.facts))

    def _finish_stage(self, stage: int, runs: bool) -> None:
        if self._stopping or self._program.silent:
            return
        if runs:
            self._gangs.note_start(self)
            self.running = True
            if self._program.seconds is not None:
                self._gangs.later(self._program.seconds, lambda: self._end(code=self._program.code))
        self._passed = stage
        self._report(StagePassed(self._now(), self.attempt_id, self.name, stage))

    def _end(self, code: int | None = None, signal: int | None = None, sender: str | None = None) -> None:
        if not (self.alive and self.running):
            return
        self.running = False
        lines = () if code == 0 else (f"last words of {self.name}",)
        ended = Ended(self._now(), code=code, signal=signal, sender=sender, last_lines=lines)
        self._report(RunExited(ended.at, self.attempt_id, self.name, ended))
        if self._stopping:
            self._soon(self._close)

    def _close(self) -> None:
        if self.running or self.closed or not self.alive:
            return
        if (wait_s := self._gangs.archive_back_at - self._now()) > 0:
            self._report(RunsGone(self._now(), self.attempt_id, self.name))
            self._gangs.later(wait_s, self._close)
            return
        self.closed = True
        self._report(InstanceClosed(self._now(), self.attempt_id, self.name))

    def _report(self, report: Report) -> None:
        if self.alive:
            self.unsent.append(report)
            self._gangs.send_soon(self)

    def _soon(self, action: Callable[[], None]) -> None:
        self._gangs.later(self._gangs.delay(), lambda: action() if self.alive else None)

    def _now(self) -> float:
        return self._gangs.now()


class Gangs(ABC):
    """All reservations and instances of a simulated cluster."""

    def __init__(self, rooms: Sequence[Node], programs: Mapping[str, Program]) -> None:
        self.rooms = {node.id: node for node in rooms}
        self.programs = programs
        self.gangs: dict[str, dict[str, FakeInstance]] = {}
        self.starts: Counter[tuple[str, str]] = Counter()
        self.refusals = 0
        self.faults: list[str] = []
        self.archive_back_at = -math.inf
        self.servants_back_at: dict[str, float] = {}
        self.cut_until: dict[str, float] = {}
        self.out_of_reach: list[FakeInstance] = []
        self._noticed_at: dict[str, float] = {}
        self._jobs: dict[str, Job] = {}

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def delay(self) -> float:
        """How long the next small thing takes."""

    @abstractmethod
    def later(self, delay_s: float, action: Callable[[], None]) -> None: ...

    @abstractmethod
    def send_soon(self, instance: FakeInstance) -> None:
        """Send what the instance has not had acknowledged."""

    def free_rooms(self) -> tuple[Node, ...]:
        """The living nodes and what reservations leave of them."""
        rooms = tuple(self.rooms.values())
        for attempt_id, gang in self.gangs.items():
            job = self._jobs[attempt_id]
            taken = [Assignment(name, item.node_id, item.node_id, "") for name, item in gang.items()]
            rooms = reserve(rooms, members(job.spec), taken)
        return rooms

    def reserve_gang(self, job: Job) -> None:
        """Make the reservation, once; raises ReservationRefused."""
        if job.attempt_id in self.gangs:
            return
        if self.refusals > 0:
            self.refusals -= 1
            raise ReservationRefused("somebody else was faster")
        if any(item.node_id not in self.rooms for item in job.instances):
            raise ReservationRefused("a node has left")
        gang = members(job.spec)
        self._jobs[job.attempt_id] = job
        self.gangs[job.attempt_id] = {
            item.name: FakeInstance(self, job, member, item.node_id, item.ip)
            for item, member in zip(job.instances, gang, strict=True)
        }
        over = [n.id for n in self.free_rooms() if any(amount < -1e-6 for amount in n.free.values())]
        self.faults += [f"{node_id} is oversubscribed by {job.attempt_id}" for node_id in over]

    def find(self, attempt_id: str, name: str) -> FakeInstance:
        """Raises InstanceGone when there is no such instance alive."""
        instance = self.gangs.get(attempt_id, {}).get(name)
        if instance is None or instance.mourned:
            raise InstanceGone("its actor died")
        return instance

    def release_gang(self, attempt_id: str) -> None:
        for instance in self.gangs.pop(attempt_id, {}).values():
            if self.cut_for(instance.node_id) > 0:
                self.out_of_reach.append(instance)
                continue
            if instance.running and not self.programs.get(instance.name, TRAINING).hung:
                self.faults.append(f"{instance.name} of {attempt_id} was running when it was removed")
            instance.die()

    def lose_node(self, node_id: str) -> None:
        self.rooms.pop(node_id, None)
        for gang in list(self.gangs.values()):
            for instance in gang.values():
                if instance.node_id == node_id and instance.alive:
                    instance.die()

    # Hosts that say nothing.

    def cut(self, node_id: str, for_s: float = math.inf) -> None:
        """No packet passes for so long. For good, Ray gives the node up after a while, and what runs there ends when its fence falls."""
        self.cut_until[node_id] = self.now() + for_s
        if for_s > NOTICED_S:
            self._noticed_at[node_id] = self.now() + NOTICED_S
            self.later(NOTICED_S, lambda: self._give_up(node_id))
            self.later(FENCE_S, lambda: self._fence_off(node_id))

    def cut_for(self, node_id: str) -> float:
        """For how long the node cannot be reached."""
        return max(0.0, self.cut_until.get(node_id, -math.inf) - self.now())

    def servant_away_for(self, node_id: str) -> float:
        """For how long the node's actor is not there."""
        return max(0.0, self.servants_back_at.get(node_id, -math.inf) - self.now())

    def stuck_for(self, node_id: str) -> float:
        """For how long a call to the node hangs: until it can be reached, or Ray has given it up."""
        if node_id not in self.rooms or self.cut_for(node_id) == 0:
            return 0.0
        return min(self.cut_for(node_id), self._noticed_at.get(node_id, math.inf) - self.now())

    def _give_up(self, node_id: str) -> None:
        self.rooms.pop(node_id, None)
        for instance in self._at_node(node_id):
            instance.mourn()

    def _fence_off(self, node_id: str) -> None:
        for instance in self._at_node(node_id):
            instance.die()

    def _at_node(self, node_id: str) -> list[FakeInstance]:
        known = [item for gang in self.gangs.values() for item in gang.values()]
        return [item for item in [*known, *self.out_of_reach] if item.node_id == node_id]

    def note_start(self, instance: FakeInstance) -> None:
        """Write down what must never be: the same command started twice, or two attempts at once."""
        self.starts[instance.attempt_id, instance.name] += 1
        if self.starts[instance.attempt_id, instance.name] > 1:
            self.faults.append(f"{instance.name} of {instance.attempt_id} was started twice")
        known = [item for gang in self.gangs.values() for item in gang.values()]
        others = {item.attempt_id for item in [*known, *self.out_of_reach] if item.running}
        others = {other for other in others if other.rpartition(".")[0] == instance.job_id}
        if others - {instance.attempt_id}:
            self.faults.append(f"{instance.attempt_id} runs beside {others}")

    def left_over(self) -> list[str]:
        return sorted([*self.gangs, *(item.attempt_id for item in self.out_of_reach if item.alive)])


def assignments(job: Job, rooms: Sequence[Node]) -> tuple[Assignment, ...]:
    """Where placement puts the job; it must fit."""
    found = place(members(job.spec), job.spec.placement, rooms)
    assert isinstance(found, tuple), found
    return found


def moved(job: Job, **changes: object) -> Job:
    """The job with other values of its spec."""
    return replace(job, spec=job.spec.model_copy(update=changes))
