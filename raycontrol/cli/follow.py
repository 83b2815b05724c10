"""Follow a job to its end: logs on stdout, progress on stderr, signals turned into what the user meant.

Three threads read (logs, events, an answer to a request to stop) and put what they see into one queue; the main
thread alone decides. The log thread writes by itself, so that a slow reader of stdout holds up nothing else.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from raycontrol.cli.output import Output, OutputClosed
from raycontrol.cli.render import duration, nodes_line, summary
from raycontrol.cli.services import FOLLOWING
from raycontrol.errors import RaycontrolError

if TYPE_CHECKING:
    from raycontrol.client import JobHandle
    from raycontrol.status import Event, JobInfo

STOPPED = 130
HUNG_UP = 128 + signal.SIGHUP
UNREACHABLE = 125
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Signalled:
    number: int


@dataclass(frozen=True)
class Happened:
    event: Event
    text: str


@dataclass(frozen=True)
class JobEnded:
    info: JobInfo


@dataclass(frozen=True)
class LogsEnded:
    error: Exception | None = None


@dataclass(frozen=True)
class StopRefused:
    error: Exception


@dataclass(frozen=True)
class Lost:
    error: Exception


News = Signalled | Happened | JobEnded | LogsEnded | StopRefused | Lost
Inbox: TypeAlias = "queue.SimpleQueue[News]"


def new_inbox() -> Inbox:
    """Return a queue whose ``put`` may be called from a signal handler, as other queues' may not."""
    return queue.SimpleQueue()


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP become news; those ignored at the start (nohup, `&`) stay ignored.

    Until ``ready`` a job may be half submitted, so the signal only waits in the inbox; a second SIGINT then raises
    KeyboardInterrupt.
    """

    def __init__(self, inbox: Inbox, out: Output) -> None:
        self._inbox = inbox
        self._out = out
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._ready = False
        self._interrupted = False

    def __enter__(self) -> Signals:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._taken():
            signal.signal(number, self._before[number])

    def ready(self) -> None:
        """The job is submitted: take the signals again (Ray replaces handlers when it connects)."""
        self._ready = True
        self._install()

    def _taken(self) -> list[signal.Signals]:
        return [number for number in SIGNALS if self._before[number] not in (signal.SIG_IGN, None)]

    def _install(self) -> None:
        for number in self._taken():
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._inbox.put(Signalled(number))
        if self._ready:
            return
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        if number != signal.SIGHUP and not self._interrupted:
            self._interrupted = True
            self._out.note_from_signal(
                "interrupted: the job will be stopped once it is submitted; Ctrl-C again leaves"
            )


class Follower:
    """``lines`` is where log lines go: stdout, or stderr when stdout is for one JSON document."""

    def __init__(
        self,
        job: JobHandle,
        out: Output,
        inbox: Inbox,
        *,
        lines: Callable[[str], None],
        embedded: bool,
        over_http: bool,
    ) -> None:
        self._job = job
        self._out = out
        self._inbox = inbox
        self._lines = lines
        self._embedded = embedded
        self._over_http = over_http
        self._info: JobInfo | None = None
        self._logs_ended = False
        self._stop_asked = False
        self._submitted_at = 0.0
        self._since = 0.0

    def follow(self) -> tuple[int, JobInfo | None]:
        """Return the exit status when the job has ended or the user has left, and the job if it has ended."""
        self._start(self._read_events)
        self._start(self._read_logs)
        while self._info is None or not self._logs_ended:
            status = self._take(_next(self._inbox))
            if status is not None:
                return status, self._info
        self._say_summary(self._info)
        return self._info.exit_status, self._info

    def _take(self, news: News) -> int | None:
        """Act on one piece of news; return an exit status if following is over."""
        match news:
            case Signalled(number):
                return self._on_signal(number)
            case Happened(event, text):
                self._say_event(event, text)
            case JobEnded(info):
                self._info = info
            case LogsEnded(error):
                self._logs_ended = True
                if error is not None:
                    self._say(f"logs cannot be followed: {error}; try `raycontrol logs {self._job.id}`")
            case StopRefused(error):
                self._stop_asked = False
                self._say(f"could not be asked to stop: {error}")
            case Lost(error):
                return self._on_lost(error)
        return None

    def _on_signal(self, number: int) -> int | None:
        if self._info is not None:  # only the rest of the logs is left to print
            self._say_summary(self._info)
            return self._info.exit_status
        if number == signal.SIGHUP:
            self._say_leaving("the terminal is gone")
            return HUNG_UP
        if not self._stop_asked:
            self._stop_asked = True
            name = signal.Signals(number).name
            consequence = "ends it at once, with its Ray" if self._embedded else "leaves it to stop by itself"
            self._say(f"{name}: asking the job to stop; Ctrl-C again {consequence}")
            self._start(lambda: self._ask_to_stop(name))
        elif number == signal.SIGINT:
            self._say_leaving("leaving")
            return STOPPED
        return None

    def _on_lost(self, error: Exception) -> int:
        if not isinstance(error, RaycontrolError):
            raise error
        self._out.note(f"raycontrol: {error}")
        if self._embedded:
            self._say("the Ray that was started for this run is gone, and the job with it")
        else:
            look = f"`raycontrol get {self._job.id}` or `raycontrol logs {self._job.id}`"
            self._say(f"the job may run on; look later with {look}")
        return UNREACHABLE

    def _say_leaving(self, why: str) -> None:
        if self._embedded:
            self._say(f"{why}: ending the job and the Ray that was started for it")
            return
        state = "is being stopped" if self._stop_asked else "runs on"
        self._say(f"{why}: the job {state}; {how_to_follow(self._job.id)}")

    def _say_event(self, event: Event, text: str) -> None:
        self._since = max(self._since, event.at - self._submitted_at)  # nodes' clocks differ a little
        since = duration(self._since)
        self._say(f"{since:>7}  {self._out.state(event.state)}  {text}".rstrip())

    def _say_summary(self, info: JobInfo) -> None:
        for line in summary(info, self._out, over_http=self._over_http):
            self._say(line)

    def _say(self, text: str) -> None:
        self._out.note(f"[{self._job.id}] {text}")

    # What follows runs in threads of its own and only puts news into the inbox.

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=FOLLOWING, daemon=True).start()

    def _read_events(self) -> None:
        try:
            self._submitted_at = self._job.info().submitted_at
            self._read_changes()
            self._inbox.put(JobEnded(self._job.info()))
        except Exception as error:  # decided on, or raised again, by the main thread
            self._inbox.put(Lost(error))

    def _read_changes(self) -> None:
        """Pass on what concerns the whole job; news of single instances, and the end (the summary tells), are not."""
        state = ""
        for event in self._job.watch():
            changes = event.state != state
            state = event.state
            if (changes or event.instance is None) and not event.state.terminal:
                self._inbox.put(Happened(event, self._text(event) if changes else event.message))

    def _text(self, event: Event) -> str:
        nodes = nodes_line(self._job.info()) if event.state == "RUNNING" else ""
        return nodes or event.message

    def _read_logs(self) -> None:
        try:
            for line in self._job.logs(follow=True):
                self._lines(line)
        except OutputClosed:  # `| head` has seen enough; the job is still followed to its end
            self._inbox.put(LogsEnded())
        except Exception as error:  # the events tell whether the cluster is gone
            self._inbox.put(LogsEnded(error))
        else:
            self._inbox.put(LogsEnded())

    def _ask_to_stop(self, name: str) -> None:
        try:
            self._job.stop(why=f"{name} sent to `raycontrol run`")
        except Exception as error:  # said by the main thread; the user may try again
            self._inbox.put(StopRefused(error))


def _next(inbox: Inbox) -> News:
    """Wait for news. A second signal close to a first one may be delivered to another thread, where nothing wakes
    this one to run its handler; looking up four times a second does.
    """
    while True:
        try:
            return inbox.get(timeout=0.25)
        except queue.Empty:
            continue


def how_to_follow(job_id: str) -> str:
    return f"follow it with `raycontrol logs -f {job_id}` or `raycontrol wait {job_id}`"
