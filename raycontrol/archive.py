"""The archive: keeps the bytes of jobs on the head, appended at offsets, and hands packages to nodes.

A plain class; a cluster runs one of them as an actor on the head, and a client that has no cluster reads with one
of its own. It decides nothing and remembers nothing: every answer comes from the files, so it may be killed at any
time and the senders go on from what the next one says it holds. A file of bytes on their way is locked while it is
written, so two archives on one home do no harm.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from raycontrol.disk import (
    HIDDEN,
    erase,
    free_bytes,
    locked,
    make_way,
    matching,
    remove_tree,
    replace_file,
    sha256,
    sync_folder,
    sync_path,
    tree_bytes,
)
from raycontrol.errors import PackageError, StoreError
from raycontrol.hardware import InstanceUsage
from raycontrol.logs import MIB, JobFolder, PackageFolder, jobs_folder, read_at
from raycontrol.outputs import OutputFile, Tops
from raycontrol.samples import (
    LONGEST_HISTORY_BYTES,
    LONGEST_SAMPLE_BYTES,
    appended,
    last_of_each,
    thinned,
)

T = TypeVar("T")

LONGEST_POLL_S = 20.0
LARGEST_READ_BYTES = 16 * MIB
SHARED_S = 60.0
"""How long the removal of a job's outputs from the shared folder may take: its file server may be dead."""
STALE_S = 3600.0
"""Uploads that nobody went on with for so long are given up."""
INCOMING_PACKAGES = "incoming/*.part"


class Archive:
    """Logs, outputs and packages below ``home``; nothing is made there before the first write.

    ``min_free_bytes`` of the file system stay free: a write that would go below raises ``StoreError`` and changes
    nothing, so that senders wait. Without ``clean_up``, what an earlier archive left half done stays: a reader removes
    nothing. A fault of the file system (disk full, read-only) raises ``StoreError``, a name
    that could lead out of ``home`` ``UsageError``.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        *,
        min_free_bytes: int = 200 * MIB,
        clean_up: bool = True,
        shared_s: float = SHARED_S,
    ) -> None:
        self.home = Path(home).expanduser()
        self.min_free_bytes = min_free_bytes
        self._shared_s = shared_s
        self._packages = PackageFolder(self.home)
        # Pools of their own, so that hashing a package or deleting a job never keeps the logs waiting, and a dead file server
        # of the folder that the nodes share holds up nothing but what is asked of that.
        self._quick = ThreadPoolExecutor(8, thread_name_prefix="archive")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="archive-slow")
        self._shared = ThreadPoolExecutor(4, thread_name_prefix="archive-shared")
        self._waiting: dict[tuple[str, int], set[asyncio.Event]] = {}
        if clean_up:
            remove_stale(self.home, older_than_s=STALE_S)

    def close(self) -> None:
        """End the threads; calls under way are finished first."""
        self._quick.shutdown()
        self._slow.shutdown()
        self._shared.shutdown()

    # Logs

    async def append(self, job_id: str, attempt: int, instance: str, offset: int, data: bytes) -> int:
        """Append the part of ``data`` past what is held; returns the bytes held now, where the sender goes on.

        ``offset`` is the place of ``data`` in the sender's file. Bytes held already are ignored, and past a gap
        nothing is taken, so any call may be repeated. With empty ``data`` it asks, and makes the (empty) log.
        """
        path = JobFolder(self.home, job_id).log(instance, attempt)
        held = await self._in(self._quick, self._append, path, offset, data)
        for event in self._waiting.get((job_id, attempt), ()):
            event.set()
        return held

    async def sync(self, job_id: str, attempt: int) -> None:
        """Return when the attempt's logs are on the disk and not only in memory."""
        await self._in(self._slow, sync_folder, JobFolder(self.home, job_id).logs(attempt))

    async def sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        """Bytes held of each instance's log."""
        return await self._in(self._quick, JobFolder(self.home, job_id).sizes, attempt)

    async def read(self, job_id: str, attempt: int, instance: str, offset: int, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` (and 16 MiB) of a log from ``offset``; empty at its end."""
        read = JobFolder(self.home, job_id).read
        return await self._in(
            self._quick, read, instance, attempt, offset, min(max_bytes, LARGEST_READ_BYTES)
        )

    async def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        """Where the last ``lines`` lines of a log begin: the offset to ``read`` or ``follow`` from."""
        place = JobFolder(self.home, job_id).tail_offset
        return await self._in(self._quick, place, instance, attempt, lines)

    async def follow(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        *,
        instances: Collection[str] | None = None,
    ) -> dict[str, bytes]:
        """Wait until a log has bytes past its offset, and return those of every such log.

        Logs that ``offsets`` does not name count from 0, so new instances show up by themselves; with ``instances``
        only theirs count. ``max_bytes`` (at most 16 MiB) is shared by the logs in the answer. Empty when
        ``timeout_s`` (at most 20) has passed: call again.
        """
        folder = JobFolder(self.home, job_id)
        deadline = time.monotonic() + min(timeout_s, LONGEST_POLL_S)
        most = min(max_bytes, LARGEST_READ_BYTES)
        grown = asyncio.Event()
        waiting = self._waiting.setdefault((job_id, attempt), set())
        waiting.add(grown)
        try:
            while True:
                # Cleared before the look: an append that comes after the look then ends the wait.
                grown.clear()
                news = await self._in(self._quick, folder.news, attempt, offsets, most, instances)
                if news or not await happened(grown, deadline - time.monotonic()):
                    return news
        finally:
            waiting.discard(grown)
            if not waiting:
                self._waiting.pop((job_id, attempt), None)

    # Usage

    async def append_usage(self, job_id: str, attempt: int, instance: str, line: str) -> None:
        """Add a sample, as one line of JSON, to an instance's history (``samples``); the last one again changes nothing."""
        path = JobFolder(self.home, job_id).usage(instance, attempt)
        await self._in(self._quick, self._append_usage, path, line)

    async def usage_of(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        """The last samples of each instance, oldest first; instances that have none are not in it."""
        folder = JobFolder(self.home, job_id).usages(attempt)
        return await self._in(self._quick, last_of_each, jobs_folder(self.home), folder, last)

    # Outputs

    async def append_output(
        self,
        job_id: str,
        instance: str,
        relpath: str,
        offset: int,
        data: bytes,
        mode: int,
        size: int,
        mtime_ns: int,
    ) -> int:
        """Append to an output file of ``size`` bytes; returns the bytes held, and ``size`` when it is in place.

        A file is known by path, size and time: the one in place with the same three is answered with ``size`` at
        once, and another version starts from 0 and takes the old one's place when it is whole.
        """
        folder = JobFolder(self.home, job_id)
        final = folder.output(instance, relpath)
        part = folder.incoming(instance, relpath, size, mtime_ns)
        top = folder.outputs(instance)
        return await self._in(
            self._quick, self._append_output, top, final, part, offset, data, mode, size, mtime_ns
        )

    async def outputs(self, job_id: str) -> list[OutputFile]:
        """All files that a job has left, by instance and path."""
        return await self._in(self._shared, Tops.of(self.home, job_id).files)

    async def read_output(self, job_id: str, path: str, offset: int, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` (and 16 MiB) of one of them; empty at its end."""
        read = Tops.of(self.home, job_id).read
        return await self._in(self._shared, read, path, offset, min(max_bytes, LARGEST_READ_BYTES))

    # Packages

    async def has_package(self, digest: str) -> bool:
        """Whether the package is here; one that is stays for the next hour at least, so that a job can be submitted."""
        return await self._in(self._quick, touched, self._packages.path(digest))

    async def put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        """Append to a package; returns the bytes held, as in ``append``. A whole package ignores what comes.

        ``last`` says that ``data`` ends it: when all bytes are held they are compared with ``digest`` and put in
        place, durably. Several senders of one package help each other. ``PackageError`` when the bytes are not
        those of the digest; they are dropped and a sender may start again.
        """
        self._packages.path(digest)
        return await self._in(self._slow, self._put_package, digest, offset, data, last)

    async def read_package(self, digest: str, offset: int, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` (and 16 MiB) of a package; empty at its end. ``PackageError`` without it."""
        path = self._packages.path(digest)
        return await self._in(self._quick, read_package, path, offset, min(max_bytes, LARGEST_READ_BYTES))

    # Keeping house

    async def remove_job(self, job_id: str) -> None:
        """Remove all that is kept of a job; nothing happens when there is nothing.

        What is in the shared folder goes first: as long as something is here the job is still named by ``usage``, and removed
        again. Raises StoreError where the shared folder does not let go of it in time; the rest then stays, too.
        """
        removing = self._in(self._shared, Tops.of(self.home, job_id).remove_shared)
        try:
            await asyncio.wait_for(removing, self._shared_s)
        except asyncio.TimeoutError:
            raise StoreError(
                f"the outputs of {job_id} in the shared folder were not removed within {self._shared_s:g} s; trying again later"
            ) from None
        await self._in(self._slow, remove_tree, JobFolder(self.home, job_id).root)

    async def remove_packages(self, keep: set[str]) -> None:
        """Remove every package whose digest is not in ``keep`` and that nobody has put or asked for lately, and what has
        arrived of those whose senders have given up."""
        await self._in(self._slow, remove_packages, self._packages.root, keep)

    async def usage(self) -> dict[str, Any]:
        """``{"jobs": {id: bytes}, "packages": {digest: bytes}, "free_bytes": …, "min_free_bytes": …}``."""
        return {**await self._in(self._slow, usage, self.home), "min_free_bytes": self.min_free_bytes}

    async def _in(self, pool: Executor, function: Callable[..., T], *arguments: Any) -> T:
        """Run file work in a thread of ``pool``."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except OSError as error:
            raise StoreError(f"archive {self.home}: {error}") from error

    def _append(self, path: Path, offset: int, data: bytes) -> int:
        with locked(path) as descriptor:
            return self._append_to(descriptor, offset, data)

    def _append_to(self, descriptor: int, offset: int, data: bytes) -> int:
        held = os.fstat(descriptor).st_size
        fresh = memoryview(data)[held - offset :] if offset <= held else memoryview(b"")
        if not fresh:
            return held
        self._require_room(len(fresh))
        while fresh:
            written = os.pwrite(descriptor, fresh, held)
            held, fresh = held + written, fresh[written:]
        return held

    def _append_usage(self, path: Path, line: str) -> None:
        with locked(path) as descriptor:
            size = os.fstat(descriptor).st_size
            held = os.pread(descriptor, LONGEST_SAMPLE_BYTES, max(0, size - LONGEST_SAMPLE_BYTES))
            fresh = appended(held, line)
            if size + len(fresh) <= LONGEST_HISTORY_BYTES:
                self._append_to(descriptor, size, fresh)
                return
            whole = thinned(os.pread(descriptor, size, 0) + fresh)
            self._require_room(len(whole))
            replace_file(path, whole, sync=True)

    def _require_room(self, needed: int) -> None:
        free = free_bytes(self.home)
        if free - needed < self.min_free_bytes:
            raise StoreError(
                f"archive {self.home}: {free // MIB} MiB free, below the floor of {self.min_free_bytes // MIB} MiB; "
                "nothing more is kept until there is room (`raycontrol prune` removes old jobs)"
            )

    def _append_output(
        self,
        top: Path,
        final: Path,
        part: Path,
        offset: int,
        data: bytes,
        mode: int,
        size: int,
        mtime_ns: int,
    ) -> int:
        if is_version(final, size, mtime_ns):
            return size
        with locked(part) as descriptor:
            # Another sender of this version may have finished it while we waited for the lock.
            if is_version(final, size, mtime_ns):
                part.unlink()
                return size
            for old in part.parent.glob(f"{part.name.split('.')[0]}.*"):
                if old != part:
                    old.unlink(missing_ok=True)
            held = self._append_to(descriptor, offset, data[: max(0, size - offset)])
            if held < size:
                return held
            os.fchmod(descriptor, mode & 0o777 | 0o600)
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
            os.fsync(descriptor)
            make_way(top, final)
            part.replace(final)
        return size

    def _put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        whole, part = self._packages.path(digest), self._packages.incoming(digest)
        if whole.is_file():
            return whole.stat().st_size
        with locked(part) as descriptor:
            if whole.is_file():
                part.unlink()
                return whole.stat().st_size
            held = self._append_to(descriptor, offset, data)
            if not last or held < offset + len(data):
                return held
            if sha256(part) != digest:
                part.unlink()
                raise PackageError(
                    f"package {digest}: the {held} bytes that arrived are not its own; send it again"
                )
            if not is_tar(os.pread(descriptor, tarfile.BLOCKSIZE, 0)):
                part.unlink()
                raise PackageError(
                    f"package {digest} is no uncompressed tar archive; pack the folder with `tar -cf`, without -z"
                )
            os.fsync(descriptor)
            part.replace(whole)
            sync_path(whole.parent)
        return held


def is_tar(head: bytes) -> bool:
    """Whether an uncompressed tar archive may begin so; an empty one begins with zeros."""
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return not head.strip(b"\0") and len(head) == tarfile.BLOCKSIZE
    return True


def is_version(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return found.st_size == size and found.st_mtime_ns == mtime_ns and path.is_file()


async def happened(event: asyncio.Event, timeout_s: float) -> bool:
    """True when the event came within the time."""
    try:
        await asyncio.wait_for(event.wait(), max(0.0, timeout_s))
    except asyncio.TimeoutError:
        return False
    return True


def read_package(path: Path, offset: int, max_bytes: int) -> bytes:
    data = read_at(path, offset, max_bytes)
    if not data and not path.is_file():
        raise PackageError(f"package {path.stem} is not in the archive")
    return data


def touched(path: Path) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def remove_packages(root: Path, keep: set[str]) -> None:
    for path in root.glob("*.tar"):
        if path.stem not in keep and time.time() - path.stat().st_mtime > STALE_S:
            path.unlink(missing_ok=True)
    remove_old(matching(root, INCOMING_PACKAGES), STALE_S)


def remove_stale(home: Path, older_than_s: float) -> None:
    """Remove what an earlier archive left half done: folders it was removing, uploads that ended long ago.

    What cannot be looked at or removed stays: it is in nobody's way.
    """
    jobs = jobs_folder(home)
    for hidden in matching(jobs, f"{HIDDEN}*"):
        with suppress(OSError):
            erase(hidden)
    remove_old(matching(PackageFolder(home).root, INCOMING_PACKAGES), older_than_s)
    remove_old(matching(jobs, "*/incoming/*/*.part"), older_than_s)


def remove_old(paths: Collection[Path], older_than_s: float) -> None:
    for path in paths:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


def bytes_of_jobs(home: Path) -> dict[str, int]:
    """What each job keeps, by its id."""
    return {path.name: tree_bytes(path) for path in sorted(jobs_folder(home).glob("[!.]*"))}


def usage(home: Path) -> dict[str, Any]:
    packages = {path.stem: path.stat().st_size for path in sorted(PackageFolder(home).root.glob("*.tar"))}
    return {"jobs": bytes_of_jobs(home), "packages": packages, "free_bytes": free_bytes(home)}
