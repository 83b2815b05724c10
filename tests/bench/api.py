"""What 200 followers of a job's log cost its list and the job itself, beside an empty FastAPI route in the same run.

``python -m tests.bench.api [--rounds N] …``, without root: one Ray and one ``raycontrol serve`` on this machine, and
rounds in which each way takes its turn with a job of the same work: nobody asks; clients, each with a token of its own,
poll the list once a second; the same, and others follow the log. The empty route is another process's, asked as often
in the same seconds. Clients keep what they get as it comes and look at it afterwards, so that they take little of the
machine. Prints the list's p50 and p99 beside the empty route's, the job's CPU seconds beside those of the round in
which nobody asked, and the server's memory; ends in failure if a follower missed a line, or read one twice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from tests.ray.conftest import LocalRay, free_ports
from tests.ray.test_serve import Server
from tests.support import wait_until

JOB = """
import pathlib, sys, time
go, lines, rate, work = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.02)
began, cpu = time.monotonic(), time.process_time()
for number in range(lines):
    for _ in range(work):
        pass
    print(f"step {number} loss 0.123456 accuracy 0.654321 lr 0.001 seconds {time.monotonic() - began:.3f}", flush=True)
    time.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
print("cpu", time.process_time() - cpu, flush=True)
"""
LINES_PER_S = 50
WORK = 500_000
"""Turns of an empty loop before each line, most of its time: one that sleeps took more CPU time alone than in company."""
POLLS_PER_S = 50
LIST = "/api/v1/jobs?limit=100"
SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60.0
QUIET, POLLED, FOLLOWED = WAYS = ("nobody asks", "polled", "polled and followed")


@dataclass(frozen=True)
class Sizes:
    """``followers`` of a job that writes for ``seconds``; the list has ``listed`` jobs, besides those of the rounds."""

    rounds: int
    followers: int
    seconds: int
    listed: int


@dataclass(frozen=True)
class Turn:
    """What one job's turn came to: seconds of each poll, CPU seconds of the job; and of server and controller, a second.

    ``lines`` were to be read by all followers, ``missed`` were not; ``wrong`` followers have not read just the log.
    """

    listed_s: Sequence[float]
    empty_s: Sequence[float]
    job_cpu_s: float
    server_load: float
    controller_load: float
    lines: int
    missed: int
    wrong: int


class Served(Server):
    """A server with tokens for the clients of the bench, and what it takes of the machine."""

    def __init__(self, cluster: LocalRay) -> None:
        super().__init__(cluster)
        self.tokens: list[str] = []

    def make_tokens(self) -> None:
        """One for each client that polls: a token may ask 50 times a second."""
        for number in range(POLLS_PER_S):
            wanted = {"name": f"bench-{number}", "role": "viewer", "user": "bench"}
            self.tokens.append(self.ask("POST", "/tokens", json=wanted)["token"])
            time.sleep(1 / POLLS_PER_S)

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.ask("POST", "/jobs", json={"spec": spec})["id"])

    def state(self, job_id: str) -> str:
        return str(self.ask("GET", f"/jobs/{job_id}")["state"])

    def ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self.curl(method, f"/api/v1{path}", **options)
        assert answer.is_success, answer.text
        return answer.json()

    def log(self, job_id: str) -> list[str]:
        answer = self.curl("GET", f"/api/v1/jobs/{job_id}/logs/master-0")
        return answer.text.splitlines() if answer.is_success else []

    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def controller(self) -> psutil.Process:
        """The process of the cluster that answers to the server."""
        everything = map(psutil.Process, self._cluster.pids())
        (found,) = (one for one in everything if "".join(one.cmdline()).startswith("ray::ControllerActor"))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way takes its turn (default 3)")
    parser.add_argument("--followers", type=int, default=200, help="who follows the log (default 200)")
    parser.add_argument("--seconds", type=int, default=10, help="how long the job writes (default 10)")
    parser.add_argument("--listed", type=int, default=100, help="ended jobs in the list (default 100)")
    sizes = Sizes(**vars(parser.parse_args()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as home, local_ray(Path(home)) as cluster, served(cluster) as server:
        fill(server, sizes.listed)
        (empty_port,) = free_ports(1)
        with (
            worker(partial(serve_empty, empty_port)),
            worker(partial(follow, server.port, server.tokens)) as followers,
            worker(partial(poll, server.port, empty_port, server.tokens)) as pollers,
        ):
            turns = Bench(sizes, server, followers, pollers, Path(home)).measure()
        report(sizes, turns, load)


# -- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A server, and those who ask it. ``folder`` is where jobs look for the file that lets them begin."""

    sizes: Sizes
    server: Served
    followers: Connection
    pollers: Connection
    folder: Path

    def measure(self) -> dict[str, list[Turn]]:
        """Return the turns of each way. A short one of each comes before, and pays for what the rest finds ready."""
        for way in WAYS:
            self.turn(way, 2)
        print(f"the server's memory before: {memory_mib(self.server.process()):.0f} MiB", flush=True)
        turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        for _ in range(self.sizes.rounds):
            for way in WAYS:
                turns[way].append(self.turn(way, self.sizes.seconds))
        print(f"the server's memory after:  {memory_mib(self.server.process()):.0f} MiB")
        return turns

    def turn(self, way: str, seconds: int) -> Turn:
        """Run one job. It begins when all who follow it have the head of their answer."""
        go = Path(tempfile.mkdtemp(dir=self.folder)) / "go"
        job_id = self._submit(go, seconds)
        followed = way == FOLLOWED
        if followed:
            self.followers.send((job_id, self.sizes.followers))
            assert told_by(self.followers) == "attached"
        busy = [self.server.process(), self.server.controller()]
        before = [cpu_s(process) for process in busy]
        began = time.perf_counter()
        go.touch()
        listed_s, empty_s = self._polls(seconds) if way != QUIET else self._no_polls(seconds)
        taken_s = time.perf_counter() - began
        loads = [(cpu_s(process) - spent) / taken_s for process, spent in zip(busy, before, strict=True)]
        wait_until(lambda: self.server.state(job_id) == "SUCCEEDED", WAIT_S, f"{job_id} ended well")
        written = self.server.log(job_id)
        assert len(written) == seconds * LINES_PER_S + 2, f"{job_id} wrote {len(written)} lines"
        seen: Counter[tuple[str, ...]] = told_by(self.followers) if followed else Counter()
        return Turn(
            listed_s,
            empty_s,
            job_cpu_s=float(written[-1].split()[1]),
            server_load=loads[0],
            controller_load=loads[1],
            lines=len(written) * seen.total(),
            missed=sum((Counter(written) - Counter(lines)).total() * count for lines, count in seen.items()),
            wrong=sum(count for lines, count in seen.items() if list(lines) != written),
        )

    def _submit(self, go: Path, seconds: int) -> str:
        """Return the id of a job that is ready to begin."""
        arguments = [str(go), *map(str, (seconds * LINES_PER_S, LINES_PER_S, WORK))]
        command = [sys.executable, "-c", JOB, *arguments]
        job_id = self.server.submit({"name": "bench", "command": command, "resources": {"cpu": 0.1}})
        wait_until(lambda: self.server.log(job_id), WAIT_S, f"{job_id} is ready")
        return job_id

    def _polls(self, seconds: int) -> tuple[list[float], list[float]]:
        self.pollers.send(seconds)
        listed_s, empty_s = told_by(self.pollers)
        return listed_s, empty_s

    def _no_polls(self, seconds: int) -> tuple[list[float], list[float]]:
        time.sleep(seconds)
        return [], []


def fill(server: Served, listed: int) -> None:
    """Put jobs into the list that fit nowhere, and stop them: they take no time of the cluster."""
    for _ in range(listed):
        job_id = server.submit({"name": "listed", "command": "true", "resources": {"cpu": 1000}})
        server.ask("POST", f"/jobs/{job_id}/stop", json={"why": "only to be listed"})
        time.sleep(2 / POLLS_PER_S)


# -- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def local_ray(home: Path) -> Iterator[LocalRay]:
    # Not below another folder: Ray puts sockets there, whose paths must be short.
    cluster = LocalRay(Path(tempfile.mkdtemp(prefix="rc-ray-")), home)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


@contextmanager
def served(cluster: LocalRay) -> Iterator[Served]:
    server = Served(cluster)
    server.start()
    try:
        server.make_tokens()
        yield server
    finally:
        server.kill()


@contextmanager
def worker(work: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run ``work`` in a process of its own, with the other end of the connection; the process is killed at the end."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert told_by(ours) == "ready"
        yield ours
    finally:
        process.kill()
        process.join()


def told_by(process: Connection) -> Any:
    assert process.poll(WAIT_S), f"nothing was heard for {WAIT_S:.0f} s"
    return process.recv()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / (1 << 20))


def serve_empty(port: int, connection: Connection) -> None:
    """Serve a route that does nothing, with what carries raycontrol's as well."""
    app = FastAPI()

    @app.get("/")
    async def nothing() -> dict[str, str]:
        return {}

    app.router.on_startup.append(lambda: connection.send("ready"))
    uvicorn.run(app, port=port, loop="asyncio", http="h11", ws="none", log_config=None, access_log=False)


# -- who follows -----------------------------------------------------------------------------------------------------


class Follower(asyncio.Protocol):
    """Keeps all that comes of an answer until it has ended."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parts: list[bytes] = []
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if not self.attached.done() and b"\r\n\r\n" in b"".join(self._parts):
            self.attached.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.answer.set_result(b"".join(self._parts))


def follow(port: int, tokens: Sequence[str], connection: Connection) -> None:
    """Follow jobs, one after the other: say when all are attached, and what all have read: how many read which lines."""
    connection.send("ready")
    while True:
        job_id, count = connection.recv()
        path = f"/api/v1/jobs/{job_id}/logs/master-0?follow=1"
        requests = [
            request(port, path, tokens[number % len(tokens)], "Connection: close") for number in range(count)
        ]
        connection.send(asyncio.run(followed(port, requests, lambda: connection.send("attached"))))


async def followed(
    port: int, requests: Sequence[bytes], attached: Callable[[], None]
) -> Counter[tuple[str, ...]]:
    loop = asyncio.get_running_loop()
    followers: list[Follower] = []
    for sent in requests:
        _, follower = await loop.create_connection(partial(Follower, sent), "127.0.0.1", port)
        followers.append(follower)
    await asyncio.gather(*(follower.attached for follower in followers))
    attached()
    answers = await asyncio.gather(*(follower.answer for follower in followers))
    return Counter(map(lines_of, answers))


def lines_of(answer: bytes) -> tuple[str, ...]:
    """Return the lines that a whole answer has told."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    events = [dict(field.split(": ", 1) for field in event.split("\n")) for event in events_of(body)]
    assert events[-1].get("event") == "end", "the answer was cut off"
    return tuple(event["data"] for event in events if "data" in event and "event" not in event)


def events_of(body: bytes) -> list[str]:
    """Return what the chunks of a body hold."""
    pieces: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(pieces).decode().rstrip("\n").split("\n\n")
        pieces.append(body[:length])
        body = body[length + 2 :]


# -- who polls -------------------------------------------------------------------------------------------------------


def poll(port: int, empty_port: int, tokens: Sequence[str], connection: Connection) -> None:
    """Poll for the seconds that are asked for; say how long each poll took, of the list and of the empty route."""
    connection.send("ready")
    while True:
        connection.send(asyncio.run(polled(port, empty_port, tokens, seconds=connection.recv())))


async def polled(
    port: int, empty_port: int, tokens: Sequence[str], seconds: int
) -> tuple[list[float], list[float]]:
    """Every client asks once a second; no two are due at the same time."""
    began = time.perf_counter() + 0.2
    slot_s = 1 / len(tokens)
    listing = [
        client(port, request(port, LIST, token), began + number * slot_s, seconds)
        for number, token in enumerate(tokens)
    ]
    empty = [
        client(empty_port, request(empty_port, "/", token), began + (number + 0.5) * slot_s, seconds)
        for number, token in enumerate(tokens)
    ]
    taken = await asyncio.gather(*listing, *empty)
    return list(itertools.chain(*taken[: len(tokens)])), list(itertools.chain(*taken[len(tokens) :]))


async def client(port: int, sent: bytes, first: float, times: int) -> list[float]:
    """Return how many seconds each answer took, on one connection. What is due during an answer is left out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = []
    for number in range(times):
        wait_s = first + number - time.perf_counter()
        if wait_s < -1:
            continue
        await asyncio.sleep(max(0.0, wait_s))
        began = time.perf_counter()
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        (length,) = [
            line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        await reader.readexactly(int(length))
        taken.append(time.perf_counter() - began)
    writer.close()
    return taken


def request(port: int, path: str, token: str, *more: str) -> bytes:
    fields = (f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Authorization: Bearer {token}", *more)
    return "".join(f"{field}\r\n" for field in (*fields, "")).encode()


# -- what is said ----------------------------------------------------------------------------------------------------


def report(sizes: Sizes, turns: Mapping[str, Sequence[Turn]], load: float) -> None:
    print(
        f"{sizes.rounds} rounds of {sizes.seconds} s; {sizes.followers} followers, {LINES_PER_S} lines a second; "
        f"{POLLS_PER_S} polls a second of each; {sizes.listed} ended jobs in the list; load average before: {load:.1f}"
    )
    print(f"\n{'':<32} {'polls':>6} {'p50, ms':>26} {'p99, ms':>26} {'p99, to the empty':>26}")
    for way in (POLLED, FOLLOWED):
        answers = [(turn.listed_s, turn.empty_s) for turn in turns[way]]
        ratios = [p99(listed_s) / p99(empty_s) for listed_s, empty_s in answers]
        print(f"{f'empty route, {way}':<32} {told_polls([empty_s for _, empty_s in answers])}")
        print(f"{f'list, {way}':<32} {told_polls([listed_s for listed_s, _ in answers])} {told(ratios, 1)}")
    print(
        f"\n{'CPU s':<32} {'job':>26} {'to the first':>26} {'server, a second':>26} {'controller, a second':>26}"
    )
    first = [turn.job_cpu_s for turn in turns[QUIET]]
    for way in WAYS:
        taken = [turn.job_cpu_s for turn in turns[way]]
        ratios = [one / other for one, other in zip(taken, first, strict=True)]
        loads = [(turn.server_load, turn.controller_load) for turn in turns[way]]
        print(f"{way:<32} {' '.join(map(told, (taken, ratios, *zip(*loads, strict=True))))}")
    followed = turns[FOLLOWED]
    missed, wrong = sum(turn.missed for turn in followed), sum(turn.wrong for turn in followed)
    print(f"\nlines missed: {missed} of {sum(turn.lines for turn in followed)}")
    if wrong:
        sys.exit(f"bench: {wrong} followers have not read what the job wrote")


def told_polls(rounds: Sequence[Sequence[float]]) -> str:
    middle = [1000 * statistics.median(taken) for taken in rounds]
    worst = [1000 * p99(taken) for taken in rounds]
    return f"{sum(map(len, rounds)):6} {told(middle, 1)} {told(worst, 1)}"


def told(values: Sequence[float], digits: int = 3) -> str:
    middle, least, most = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{f'{middle} ({least} … {most})':>26}"


def p99(taken: Sequence[float]) -> float:
    return statistics.quantiles(taken, n=100, method="inclusive")[-1]


if __name__ == "__main__":
    main()
