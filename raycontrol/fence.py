"""The fence: an instance that cannot reach the head's host for too long ends, and with it all that it runs.

So does one whose node the cluster has given up, as it does when a raylet hangs, or is not one of the cluster that is
there now. Else all that would go on beside the next attempt, which starts elsewhere when this time is over
(``lifecycle``). A thread looks, so that an event loop that hangs is fenced too.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial

log = logging.getLogger(__name__)

LOOK_S = 5.0
CONNECT_S = 4.0

REFUSALS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})


class Answer(Enum):
    """What a host says to a connection: nothing, that nobody listens at the port, or it takes it."""

    NONE = "none"
    REFUSED = "refused"
    TAKEN = "taken"


def knock(ip: str, port: int, timeout_s: float = CONNECT_S) -> Answer:
    try:
        socket.create_connection((ip, port), timeout_s).close()
    except OSError as error:
        return Answer.REFUSED if error.errno in REFUSALS else Answer.NONE
    return Answer.TAKEN


class Fence:
    """``ask`` says what the head's host answers now; ``fall`` is called when it has said nothing for ``limit_s``, and when
    ``given_up`` says that the cluster does without this node. A host that refuses is there: a program of the head that is
    down harms nobody.
    """

    def __init__(
        self,
        ask: Callable[[], Answer],
        fall: Callable[[], None],
        limit_s: float,
        given_up: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ask = ask
        self._fall = fall
        self._limit_s = limit_s
        self._given_up = given_up
        self._clock = clock
        self._sleep = sleep

    def start(self) -> None:
        threading.Thread(target=self.watch, name="fence", daemon=True).start()

    def watch(self) -> None:
        """Look again and again; return when the fence has fallen.

        The time counts from before the last look that was answered: what came to the head later cannot have been ours.
        """
        heard = self._clock()
        while True:
            looked = self._clock()
            answer = self._ask()
            if answer is not Answer.NONE:
                heard = looked
                if answer is Answer.TAKEN and self._given_up():
                    log.critical("the cluster has given this node up: ending what runs here")
                    self._fall()
                    return
            elif self._clock() - heard >= self._limit_s:
                log.critical(
                    "the head's host has not answered for %g s: ending all that runs here", self._limit_s
                )
                self._fall()
                return
            self._sleep(max(0.0, min(LOOK_S, heard + self._limit_s - self._clock())))


def fence_off(gcs_address: str, limit_s: float, given_up: Callable[[], bool]) -> None:
    """Let this process end when it has not reached the host of the head's GCS for so long, or the cluster has given its node
    up; its supervisors end all they run."""
    Fence(partial(_knock_at, gcs_address), lambda: os._exit(1), limit_s, given_up).start()


def end_raylet_given_up(gcs_address: str, raylet_pid: int, given_up: Callable[[], bool]) -> None:
    """Kill this node's raylet when the cluster has given the node up, which it never takes back.

    One that does not hang ends by itself then. For one that does the GCS waits, minutes long, if it was just asking it to
    reserve something, and makes no placement group on any node meanwhile.
    """
    raylet = os.pidfd_open(raylet_pid)  # which no later process of this number is
    Fence(partial(_knock_at, gcs_address), partial(_kill, raylet), math.inf, given_up).start()


def _knock_at(address: str) -> Answer:
    host, _, number = address.rpartition(":")
    return knock(host.strip("[]"), int(number))


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
