"""A simulated world for the lifecycle alone: a virtual clock, gangs, a user, and a controller that can be killed.

The controller here is the shortest one that is right (advance, store, act, acknowledge), so that what a test shows is
the lifecycle's own: a kill between any two of those steps must not be seen in how the job ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from raycontrol import queue
from raycontrol.demands import deadline, resume
from raycontrol.duties import InstanceGone, ReservationRefused
from raycontrol.events import (
    CarryOutStage,
    Command,
    Held,
    InstanceLost,
    JobEvent,
    LetGo,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    PlacementDeferred,
    Preempted,
    PrepareInstance,
    PriorityChanged,
    ReleaseNodes,
    ReserveNodes,
    StopInstance,
    StopRequested,
    Suspended,
    TimePassed,
    WatchInstance,
)
from raycontrol.job import Job, plan_of
from raycontrol.lifecycle import advance
from raycontrol.placement import Node
from raycontrol.status import JobState, Note
from tests.unit.fake_gangs import FakeInstance, Gangs, Program

Wish = StopRequested | Held | LetGo | Suspended | Preempted | PriorityChanged

QUEUE_POLL_S = 0.5
RESTART_S = 2.0
MAX_TURNS = 2000


class Killed(Exception):
    """The controller's process has ended."""


class World(Gangs):
    """One job, run to its end. ``wishes`` are what users and
    the queue want of it, and when; ``kill_at`` numbers the
    points (after a store write, before and after a command) at which the controller is killed.
    """

    def __init__(
        self,
        job: Job,
        rooms: Sequence[Node],
        programs: Mapping[str, Program] | None = None,
        *,
        delays: Sequence[float] = (),
        wishes: Sequence[Wish] = (),
        losses: Mapping[str, float] | None = None,
        kill_at: Sequence[int] = (),
    ) -> None:
        super().__init__(rooms, programs or {})
        self.job = job
        self.notes: list[Note] = []
        self.commands: list[Command] = []
        self.points = 0
        self.kills = 0
        self._kill_at = set(kill_at)
        self._delays: Iterator[float] = chain(delays, repeat(0.01))
        self._time = job.submitted_at
        self._agenda: list[tuple[float, int, int | None, Callable[[], None]]] = []
        self._numbers = iter(range(1_000_000))
        self._life = 0
        self._placing = False
        self._requests = list(wishes)
        for wish in wishes:
            self._at(wish.at, self._send_requests)
        for node_id, at in (losses or {}).items():
            self._at(at, lambda node_id=node_id: self.lose_node(node_id))

    # The world's clock.

    def now(self) -> float:
        return self._time

    def delay(self) -> float:
        return next(self._delays)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._at(self._time + delay_s, action)

    def send_soon(self, instance: FakeInstance) -> None:
        self.later(self.delay(), lambda: self._send(instance))

    def run(self) -> Job:
        """Let time pass until the job has ended."""
        self._guard(lambda: self._act(resume(self.job)))
        for _ in range(MAX_TURNS):
            if self.job.state.terminal:
                return self.job
            self._guard(self._turn)
        raise AssertionError(f"not ended after {MAX_TURNS} turns: {self.job}")

    def _turn(self) -> None:
        if self.job.state is JobState.QUEUED and not self._placing:
            self._placing = True
            self._news(QUEUE_POLL_S, self._place)
        limit = deadline(self.job)
        if limit is not None and (not self._agenda or limit <= self._agenda[0][0]):
            self._time = max(self._time, limit)
            self._take(TimePassed(self._time))
            return
        assert self._agenda, f"nothing will ever happen again: {self.job}"
        at, _, life, action = heapq.heappop(self._agenda)
        self._time = max(self._time, at)
        if life in (None, self._life):
            action()

    def _at(self, at: float, action: Callable[[], None], life: int | None = None) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), life, action))

    # The controller.

    def _guard(self, action: Callable[[], None]) -> None:
        """Act; if that kills the controller, begin again from the store until it is through."""
        try:
            action()
        except Killed:
            self.kills += 1
            self._life += 1
            self._placing = False
            self._time += RESTART_S
            self._send_again()
            self._guard(lambda: self._act(resume(self.job)))

    def _take(self, event: JobEvent) -> None:
        step = advance(self.job, event)
        if step.job != self.job or step.notes:
            self.job = step.job
            self.notes += step.notes
            self._point()
        self._act(step.commands)

    def _act(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._point()
            self.commands.append(command)
            self._carry_out(command)
            self._point()

    def _point(self) -> None:
        self.points += 1
        if self.points in self._kill_at:
            raise Killed

    def _carry_out(self, command: Command) -> None:
        job = self.job
        try:
            match command:
                case ReserveNodes():
                    self.reserve_gang(job)
                    self._tell_later(lambda: NodesReserved(self._time, job.attempt_id))
                case ReleaseNodes(keep=keep):
                    self.release_gang(job.attempt_id)
                    self._tell_later(lambda: NodesReleased(self._time, job.attempt_id, keep))
                case WatchInstance(attempt_id, name):
                    life = self._life
                    self.find(attempt_id, name).mourners.append(
                        lambda: self._lost(attempt_id, name) if life == self._life else None
                    )
                case PrepareInstance(attempt_id, name):
                    self.find(attempt_id, name).prepare()
                case CarryOutStage(attempt_id, name, stage):
                    runs = bool(plan_of(job).stages[stage].runs)
                    self.find(attempt_id, name).carry_out(stage, runs)
                case StopInstance(attempt_id, name, grace_s, why):
                    self.find(attempt_id, name).stop(grace_s, why)
        except ReservationRefused as refusal:
            why = str(refusal)
            self._tell_later(lambda: NodesRefused(self._time, job.attempt_id, why))
        except InstanceGone:
            self._lost(job.attempt_id, command.instance)  # type: ignore[union-attr]

    def _lost(self, attempt_id: str, name: str) -> None:
        self._tell_later(lambda: InstanceLost(self._time, attempt_id, name, "its actor died"))

    def _place(self) -> None:
        self._placing = False
        if self.job.held is not None or self._time < (self.job.not_before or 0.0):
            return
        waiting = queue.Waiting(self.job.id, self.job.spec, self.job.submitted_at)
        match queue.decide([waiting], self.free_rooms()):
            case [queue.PlaceNow(_, found)]:
                self._take(NodesChosen(self._time, found))
            case [queue.KeepWaiting(why=why)]:
                self._take(PlacementDeferred(self._time, why))

    def _tell_later(self, event: Callable[[], JobEvent]) -> None:
        self._news(self.delay(), lambda: self._take(event()))

    def _news(self, delay_s: float, action: Callable[[], None]) -> None:
        """What only this life of the controller knows."""
        self._at(self._time + delay_s, action, self._life)

    # What instances and the user have to say, until it is acknowledged.

    def _send(self, instance: FakeInstance) -> None:
        while instance.unsent:
            self._take(instance.unsent[0])
            if instance.unsent:  # it may have died of what it said
                del instance.unsent[0]

    def _send_requests(self) -> None:
        while self._requests and self._requests[0].at <= self._time:
            self._take(self._requests[0])
            del self._requests[0]

    def _send_again(self) -> None:
        self.later(0.0, self._send_requests)
        for gang in self.gangs.values():
            for instance in gang.values():
                self.later(self.delay(), lambda instance=instance: self._send(instance))


def ending(job: Job) -> tuple[object, ...]:
    """All that a user sees of how a job ended, times aside."""
    gang = [(i.name, i.state, i.note, i.ended and (i.ended.code, i.ended.signal)) for i in job.instances]
    return job.state, job.reason, job.verdict, job.attempt, gang
