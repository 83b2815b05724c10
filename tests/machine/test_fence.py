"""The fence: who cannot reach the head's host ends; who is only refused does not."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from raycontrol.fence import LOOK_S, Answer, Fence, end_raylet_given_up, knock


class Head:
    """A head that answers while ``there``; time passes when somebody sleeps, and each look takes ``look_s``."""

    def __init__(self, there: Iterator[bool], look_s: float = 0.0) -> None:
        self._there = there
        self._look_s = look_s
        self.now = 0.0
        self.fell_at: float | None = None

    def ask(self) -> Answer:
        self.now += self._look_s
        return Answer.TAKEN if next(self._there) else Answer.NONE

    def fall(self) -> None:
        self.fell_at = self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def fence(self, limit_s: float) -> Fence:
        return Fence(self.ask, self.fall, limit_s, lambda: False, lambda: self.now, self.sleep)


def looks(*runs: tuple[bool, int]) -> Iterator[bool]:
    for there, times in runs:
        yield from [there] * times
    raise AssertionError("it looks again after it has fallen")


def test_a_head_that_is_silent_for_too_long_makes_the_fence_fall_in_time() -> None:
    head = Head(looks((True, 3), (False, 11)))
    head.fence(50).watch()
    assert head.fell_at == 2 * LOOK_S + 50


def test_a_head_that_was_away_for_a_while_harms_nobody() -> None:
    head = Head(looks((True, 1), (False, 9), (True, 1), (False, 11)))
    head.fence(50).watch()
    assert head.fell_at == 10 * LOOK_S + 50


@pytest.mark.parametrize("look_s", [1.0, 4.0])
def test_looks_that_take_their_time_count_from_their_begin(look_s: float) -> None:
    head = Head(looks((True, 1), (False, 20)), look_s)
    head.fence(50).watch()
    assert head.fell_at is not None and 50 <= head.fell_at <= 50 + look_s


def test_a_node_that_the_cluster_has_given_up_makes_the_fence_fall_at_once() -> None:
    head = Head(looks((True, 3)))
    given_up = iter([False, False, True])
    Fence(head.ask, head.fall, 50, lambda: next(given_up), lambda: head.now, head.sleep).watch()
    assert head.fell_at == 2 * LOOK_S


def test_a_head_without_ray_gives_nobody_up() -> None:
    head = Head(looks((False, 11)))
    answers = iter([Answer.REFUSED, Answer.REFUSED])
    Fence(
        lambda: next(answers, None) or head.ask(), head.fall, 50, lambda: True, lambda: head.now, head.sleep
    ).watch()
    assert head.fell_at == LOOK_S + 50


def test_a_host_takes_a_connection_or_refuses_it_or_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert knock("127.0.0.1", port) is Answer.TAKEN
    assert knock("127.0.0.1", port) is Answer.REFUSED
    with silent() as port:
        assert knock("127.0.0.1", port, 0.2) is Answer.NONE


@contextmanager
def silent() -> Iterator[int]:
    """Give a port to which connections are neither taken nor refused: so many wait there that the kernel drops more."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_raylet_that_hangs_is_killed_when_its_node_is_given_up_and_no_sooner() -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    raylet.send_signal(signal.SIGSTOP)
    words = iter([False, True])
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        end_raylet_given_up(f"127.0.0.1:{gcs.getsockname()[1]}", raylet.pid, lambda: next(words))
        assert raylet.wait(timeout=30) == -signal.SIGKILL
    assert next(words, None) is None
