"""What an instance proves before the start command runs: that its mounts can be made, and that it reaches the others, by TCP,
through the job's own ssh, or as nodes of the job's own Ray cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from raycontrol import process
from raycontrol.disk import remove_tree
from raycontrol.errors import RaycontrolError
from raycontrol.logs import tail
from raycontrol.plan import Mount, RayNodesJoined, TcpReachable

CONNECT_TRY_S = 5.0
MOUNT_LIMIT_S = 60.0
RETRY_S = 0.2
PROOFS_AT_ONCE = 16
RAY_SLACK_S = 10.0
"""How much longer than its limit the program that asks Ray may take to say who is missing."""


JOINED_PROGRAM = "raynodes.py"


class UnreachableError(RaycontrolError):
    """Instances of a job cannot reach each other, or have not found together."""


class MountsError(RaycontrolError):
    """What a job wants mounted cannot be mounted on a node."""


async def mountable(own: str, wanted: Sequence[Mount], folder: Path, mark: str) -> tuple[Mount, ...]:
    """Return what of ``wanted`` can be mounted here: all that is not optional, or the error says why not."""
    mounts = tuple(mount for mount in wanted if mount.beside is None or Path(mount.beside).is_dir())
    for attempt in dict.fromkeys((mounts, tuple(mount for mount in mounts if not mount.optional))):
        fault = await _mount_fault(attempt, folder, mark) if attempt else None
        if fault is None:
            return attempt
    raise MountsError(f"{own}: {fault}")


async def _mount_fault(mounts: tuple[Mount, ...], folder: Path, mark: str) -> str | None:
    """Make them once for a program that does nothing; return why they cannot be made."""
    run = process.Run(
        name="prove-mounts",
        argv=("true",),
        env={},
        cwd="/",
        folder=str(folder / "proofs" / "mounts"),
        mark=mark,
        mounts=mounts,
    )
    exit_, _ = await _run_to_its_end(run, MOUNT_LIMIT_S)
    return exit_.error if exit_.code is None else None


async def reach(own: str, target: TcpReachable, deadline: float) -> None:
    """Connect, trying again until the deadline (monotonic); then say that ``own`` could not, and how it failed."""
    while True:
        try:
            opening = asyncio.open_connection(target.host, int(target.port))
            _, writer = await asyncio.wait_for(opening, CONNECT_TRY_S)
            writer.close()
            return
        except (OSError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{own} cannot connect to {target.target} at {target.host}:{target.port} ({_how(error)}). Only the "
                    f"way to the node of {target.target} was tried; check firewalls and routes between the two nodes"
                ) from error
        await asyncio.sleep(RETRY_S)


class SshProofs:
    """Runs commands on other instances with the very ``ssh`` and ``environment`` that jobs have.

    ``own`` names this instance in errors, ``folder`` is its private one, ``mark`` that of its attempt.
    """

    def __init__(self, own: str, folder: Path, environment: Mapping[str, str], mark: str) -> None:
        self._own = own
        self._ssh = folder / "bin" / "ssh"
        self._folder = folder / "proofs"
        self._environment = environment
        self._mark = mark
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(PROOFS_AT_ONCE)

    async def answers(self, target: str, deadline: float) -> None:
        """Run `ssh TARGET true` until it answers, or until the deadline (monotonic); then say what ssh says."""
        said = ""
        while True:
            async with self._slots:
                exit_, words = await self._try(target, deadline)
            if exit_.code == 0:
                return
            said = words or said
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{self._own} cannot run a command on {target} through ssh: "
                    f"{said or exit_.error or 'no answer'}. Check firewalls and routes between the two nodes"
                )
            await asyncio.sleep(RETRY_S)

    async def _try(self, target: str, deadline: float) -> tuple[process.Exit, str]:
        """Run it once; return how it ended and what it said."""
        number = next(self._numbers)
        run = process.Run(
            name=f"prove-ssh-{number}",
            argv=(str(self._ssh), "-n", target, "true"),
            env=self._environment,
            cwd="/",
            folder=str(self._folder / str(number)),
            mark=self._mark,
        )
        exit_, lines = await _run_to_its_end(run, max(RETRY_S, deadline - time.monotonic()))
        return exit_, " ".join(lines)


class RayProofs:
    """Asks the job's own Ray cluster, with the Python that the start command finds, who has joined it.

    ``own``, ``folder``, ``environment`` and ``mark`` as for ``SshProofs``; ``package_dir`` is raycontrol's,
    ``mounts`` are what the job's runs have: its Python may be in one.
    """

    def __init__(
        self,
        own: str,
        folder: Path,
        environment: Mapping[str, str],
        mark: str,
        package_dir: str,
        mounts: tuple[Mount, ...] = (),
    ) -> None:
        self._own = own
        self._mounts = mounts
        self._folder = folder / "proofs"
        self._environment = environment
        self._mark = mark
        self._address = environment["RAY_ADDRESS"]
        self._program = str(Path(package_dir) / JOINED_PROGRAM)

    async def joined(self, wanted: RayNodesJoined, deadline: float) -> None:
        """Wait until all have joined, or until the deadline (monotonic); then say who is missing."""
        limit_s = deadline - time.monotonic()
        run = process.Run(
            name="prove-ray-nodes",
            argv=("python3", self._program, self._address, str(len(wanted.instances)), f"{limit_s:.1f}"),
            env=self._environment,
            cwd="/",
            folder=str(self._folder / "ray-nodes"),
            mark=self._mark,
            mounts=self._mounts,
        )
        exit_, lines = await _run_to_its_end(run, limit_s + RAY_SLACK_S)
        if exit_.code != 0:
            said = lines or ([exit_.error] if exit_.error else [])
            raise UnreachableError(f"{self._own}: {_who_is_missing(wanted.instances, said)}")


async def _run_to_its_end(run: process.Run, limit_s: float) -> tuple[process.Exit, list[str]]:
    """Run a proof; return how it ended and what it said last. Nothing of it is left then, also when this is cancelled."""
    proof = await process.start(run)
    try:
        exit_ = await asyncio.wait_for(proof.gone(), limit_s)
    except asyncio.TimeoutError:
        exit_ = await proof.kill("it takes too long")
    finally:
        await asyncio.shield(asyncio.ensure_future(proof.kill("the proof is over")))
    lines = await asyncio.to_thread(tail, Path(run.folder) / process.LOG_FILE, 5, 4096)
    await asyncio.to_thread(remove_tree, Path(run.folder))
    return exit_, list(lines)


def _who_is_missing(instances: Sequence[str], lines: Sequence[str]) -> str:
    """Read what ``raynodes`` said last: the ranks that are missing, or what went wrong."""
    words = lines[-1].split() if lines else []
    if words[:1] == ["missing"]:
        names = ", ".join(instances[int(rank)] for rank in words[1:])
        return f"no Ray node of {names} has joined the job's Ray cluster; check firewalls between the nodes"
    said = " ".join(lines) or "no answer"
    return f"the job's Ray cluster cannot be asked who has joined it: {said}"


def _how(error: Exception) -> str:
    """Return how a connection failed, as the system says it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else str(error) or "no answer"
