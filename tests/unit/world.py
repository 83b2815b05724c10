"""A simulated world for the lifecycle alone: a virtual clock, gangs, a user, and a controller that can be killed.

The controller here is the shortest one that is right (advance, store, act, acknowledge), so that what a test shows is
the lifecycle's own: a kill between any two of those steps must not be seen in how the job ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from raycontrol import queue
from raycontrol.attempts import fenced_anew
from raycontrol.demands import due, duties
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
from raycontrol.heldstore import LEASE_BEAT_S
from raycontrol.job import Job, plan_of
from raycontrol.lifecycle import advance
from raycontrol.placement import Node
from raycontrol.status import JobState, Note
from raycontrol.steadyclock import SteadyClock
from tests.unit.fake_gangs import FakeInstance, Gangs, Program

Wish = StopRequested | Held | LetGo | Suspended | Preempted | PriorityChanged

QUEUE_POLL_S = 0.5
RESTART_S = 2.0
CLOSEST_S = 0.01
"""How near to a limit the clock is looked at again; it need not go as fast as time does."""
MAX_TURNS = 2000


class Killed(Exception):
    """The controller's process has ended; another one is there after ``for_s``."""

    def __init__(self, for_s: float = RESTART_S) -> None:
        super().__init__(for_s)
        self.for_s = for_s


class World(Gangs):
    """One job, run to its end. ``wishes`` are what users and the queue want of it, and when; ``kill_at`` numbers the
    points (after a store write, before and after a command) at which the controller is killed. ``upsets`` are what
    happens a tenth of a second after the job has entered a state for the first time; ``pace_s`` is how long small things take.
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
        upsets: Mapping[JobState, Callable[[World], None]] | None = None,
        pace_s: float = 0.01,
    ) -> None:
        super().__init__(rooms, programs or {})
        self.job = job
        self.notes: list[Note] = []
        self.commands: list[Command] = []
        self.points = 0
        self.kills = 0
        self._kill_at = set(kill_at)
        self._delays: Iterator[float] = chain(delays, repeat(pace_s))
        self._time = job.submitted_at
        self._ended_at = math.inf
        self._step_s = 0.0
        self._clock = self._new_clock()
        self._lag_s = 0.0
        self._heard_at = 0.0
        self._down = False
        self._inbox: list[JobEvent] = []
        self._locked_until = 0.0
        self._upsets = dict(upsets or {})
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
        """The controller's clock, to which the times of all others are moved."""
        return self._clock()

    def _new_clock(self) -> SteadyClock:
        return SteadyClock(lambda: self._time + self._step_s, lambda: self._time)

    def delay(self) -> float:
        return next(self._delays)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._at(self._time + delay_s, action)

    def send_soon(self, instance: FakeInstance) -> None:
        self.later(self.delay(), lambda: self._send(instance))

    def run(self) -> Job:
        """Let time pass until the job has ended."""
        self._guard(lambda: self._act(duties(self.job)))
        self._upset()
        for _ in range(MAX_TURNS):
            if self.job.state.terminal:
                self._ended_at = self._time
                return self.job
            self._guard(self._turn)
        raise AssertionError(f"not ended after {MAX_TURNS} turns: {self.job}")

    def run_out(self) -> None:
        """Let everything happen that is still to come."""
        while self._agenda:
            self._guard(self._turn)

    def lasted_s(self) -> float:
        """For how long the job has been there, by a clock that nobody sets."""
        return self._ended_at - self.job.submitted_at

    def _turn(self) -> None:
        if not (self._down or self._locked):
            if self.job.state is JobState.QUEUED and not self._placing:
                self._placing = True
                self._news(QUEUE_POLL_S, self._place)
            limit = due(self.job, self._lag_s)
            if limit is not None and self._is_next(limit):
                return
        assert self._agenda, f"nothing will ever happen again: {self.job}"
        at, _, life, action = heapq.heappop(self._agenda)
        self._time = max(self._time, at)
        if life in (None, self._life):
            action()

    def _is_next(self, limit: float) -> bool:
        """Tell the job that its time has come, or come nearer to it, if nothing happens earlier."""
        if limit <= self.now():
            self._take(TimePassed(self.now()))
            return True
        at = self._time + max(limit - self.now(), CLOSEST_S)
        if self._agenda and self._agenda[0][0] < at:
            return False
        self._time = at
        return True

    def _at(self, at: float, action: Callable[[], None], life: int | None = None) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), life, action))

    # The controller.

    def _guard(self, action: Callable[[], None]) -> None:
        """Act; if that kills the controller, another one begins from the store some time later."""
        try:
            action()
        except Killed as killed:
            self.kills += 1
            self._life += 1
            self._heard_at = self.now() - LEASE_BEAT_S
            self._placing = False
            self._inbox = []
            self._down = True
            self._at(self._time + killed.for_s, self._restart)

    def _restart(self) -> None:
        if self._locked:  # a store that takes no lease has no controller
            self._at(self._locked_until, self._restart)
            return
        self._down = False
        self._clock = self._new_clock()
        self._clock.go_on_from(self._heard_at)
        if not self.job.state.terminal:
            self.job = fenced_anew(self.job, self.now())
        self._lag_s = max(0.0, self.now() - self.job.since)
        self._send_again()
        self._act(duties(self.job))

    def _take(self, event: JobEvent) -> None:
        if self._locked:
            self._inbox.append(event)
            return
        step = advance(self.job, event)
        if step.job != self.job or step.notes:
            if step.job.since != self.job.since:
                self._lag_s = self.now() - step.job.since
            self.job = step.job
            self.notes += step.notes
            self._upset()
            self._point()
        self._act(step.commands)

    def _upset(self) -> None:
        upset = self._upsets.pop(self.job.state, None)
        if upset is not None:
            self.later(0.1, lambda: upset(self))

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
                case ReserveNodes() | ReleaseNodes() if (hangs_s := self._hangs_for(command)) > 0:
                    self._news(hangs_s, lambda: self._carry_out(command) if self._is_at(job) else None)
                case ReserveNodes():
                    self.reserve_gang(job)
                    self._tell_later(lambda: NodesReserved(self.now(), job.attempt_id))
                case ReleaseNodes(keep=keep):
                    self.release_gang(job.attempt_id)
                    self._tell_later(lambda: NodesReleased(self.now(), job.attempt_id, keep))
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
            self._tell_later(lambda: NodesRefused(self.now(), job.attempt_id, why))
        except InstanceGone:
            self._lost(job.attempt_id, command.instance)  # type: ignore[union-attr]

    def _is_at(self, job: Job) -> bool:
        return (self.job.attempt_id, self.job.state) == (job.attempt_id, job.state)

    def _hangs_for(self, command: ReserveNodes | ReleaseNodes) -> float:
        nodes = {item.node_id for item in self.job.instances}
        hung_s = [self.stuck_for(node_id) for node_id in nodes]
        if isinstance(command, ReleaseNodes):
            hung_s += [self.servant_away_for(node_id) for node_id in nodes & self.rooms.keys()]
        return max(hung_s, default=0.0)

    def _lost(self, attempt_id: str, name: str) -> None:
        node_id = self.job.instance(name).node_id
        until = self.now() + self.job.fence_s if self.may_run_on(node_id) else None
        self._tell_later(lambda: InstanceLost(self.now(), attempt_id, name, "its actor died", until))

    def may_run_on(self, node_id: str) -> bool:
        """Whether the node has left the cluster, and its host does not say that nothing of Ray is left there."""
        return node_id not in self.rooms and self.cut_for(node_id) > 0

    def _place(self) -> None:
        self._placing = False
        waits_until = self.job.waits_until
        if self.job.held is not None or (waits_until is not None and self.now() < waits_until):
            return
        avoided = frozenset(self.job.avoided)
        waiting = queue.Waiting(self.job.id, self.job.spec, self.job.submitted_at, avoided=avoided)
        match queue.decide([waiting], self.free_rooms()):
            case [queue.PlaceNow(_, found)]:
                self._take(NodesChosen(self.now(), found))
            case [queue.KeepWaiting(why=why)]:
                self._take(PlacementDeferred(self.now(), why))

    def _tell_later(self, event: Callable[[], JobEvent]) -> None:
        self._news(self.delay(), lambda: self._take(event()))

    def _news(self, delay_s: float, action: Callable[[], None]) -> None:
        """What only this life of the controller knows."""
        self._at(self._time + delay_s, action, self._life)

    # What instances and the user have to say, until it is acknowledged.

    def _send(self, instance: FakeInstance) -> None:
        """What cannot be taken now is sent again when it can."""
        if (wait_s := self.cut_for(instance.node_id)) > 0:
            if wait_s < math.inf:
                self.later(wait_s, lambda: self._send(instance))
            return
        while instance.unsent and not (self._down or self._locked):
            self._take(instance.unsent[0])
            if instance.unsent:  # it may have died of what it said
                del instance.unsent[0]

    def _send_requests(self) -> None:
        if self._down or self._locked:
            return
        while self._requests and self._requests[0].at <= self._time:
            self._take(self._requests[0])
            del self._requests[0]

    def _send_again(self) -> None:
        self.later(0.0, self._send_requests)
        for gang in self.gangs.values():
            for instance in gang.values():
                self.later(self.delay(), lambda instance=instance: self._send(instance))

    # Upsets.

    @property
    def _locked(self) -> bool:
        return self._time < self._locked_until

    def ask(self, wish: Wish) -> None:
        """A user, or the queue, wants something now."""
        self._requests.append(wish)
        self._send_requests()

    def lock_store(self, for_s: float) -> None:
        """The store takes nothing for so long."""
        self._locked_until = self._time + for_s
        self.later(for_s, self._unlock)

    def _unlock(self) -> None:
        if self._down:
            return
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self._take(event)
        self._send_again()

    def set_clock(self, step_s: float) -> None:
        """Somebody sets the clock of the controller's host."""
        self._step_s += step_s

    def kill_actor(self, name: str) -> None:
        """The process of an instance's actor ends, if there is one."""
        for gang in self.gangs.values():
            gang[name].die()

    def fail(self, name: str, code: int) -> None:
        """An instance's start command ends with this code, as soon as it runs."""
        running = [gang[name] for gang in self.gangs.values() if gang[name].running]
        for instance in running:
            instance.exit(code)
        if not running:
            self.later(0.1, lambda: self.fail(name, code))

    def lose_head(self, for_s: float) -> None:
        """Ray ends, and all that runs under it. After a while there is a new one on the same hosts, with the same store."""
        for gang in self.gangs.values():
            for instance in gang.values():
                instance.die()
        self.gangs.clear()
        self.rooms = {f"new-{node.id}": replace(node, id=f"new-{node.id}") for node in self.rooms.values()}
        raise Killed(for_s)


def ending(job: Job) -> tuple[object, ...]:
    """All that a user sees of how a job ended, times aside."""
    gang = [(i.name, i.state, i.note, i.ended and (i.ended.code, i.ended.signal)) for i in job.instances]
    return job.state, job.reason, job.verdict, job.attempt, gang
