"""A job's working directory on a node: unpacked once into a cache, copied for each job.

``packing`` makes packages; ``pack``, ``upload`` and ``Package`` are its names, here for the reader's convenience.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import stat
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from raycontrol.disk import erase, hide, private_folder
from raycontrol.errors import PackageError
from raycontrol.logs import MIB, checked_digest
from raycontrol.packing import CHUNK_BYTES, Package, pack, upload

__all__ = ["Package", "PackageCache", "copy_tree", "pack", "unpack", "upload"]

log = logging.getLogger(__name__)

DAMAGE = (
    tarfile.TarError,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    OSError,
)
"""What ``tarfile`` was seen to raise on a damaged file, and what the file system may say while one is unpacked."""

STALE_S = 3600.0
KEPT_TREES = 8
AHEAD = 3
"""So many pieces of a package are asked for at a time."""

ReadPackage = Callable[[str, int, int], Awaitable[bytes]]
"""``read(digest, offset, max_bytes) -> bytes``, empty at the end: see ``Archive.read_package``."""


class PackageCache:
    """The unpacked packages of one node, in folders named by digest. No job ever runs in one of them.

    A tree's time says when it was last asked for; so a cache that starts again knows what its predecessor knew.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._fetching: dict[str, asyncio.Task[Path]] = {}
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._in_use: Counter[str] = Counter()
        private_folder(self.root)
        remove_temporaries(self.root, None, older_than_s=STALE_S)

    def path(self, digest: str) -> Path:
        return self.root / checked_digest(digest)

    @contextmanager
    def using(self, digest: str | None) -> Iterator[None]:
        """Within this block ``shrink`` leaves the tree alone: hold it from ``ensure`` until the copy is made."""
        if digest is None:
            yield
            return
        self._in_use[digest] += 1
        try:
            yield
        finally:
            self._in_use[digest] -= 1
            self._in_use += Counter()  # without those that have come to nought

    async def ensure(self, digest: str, read: ReadPackage) -> Path:
        """The unpacked tree, fetched with ``read`` if need be; callers that come meanwhile share one transfer.

        ``PackageError`` when the bytes are not those of the digest or cannot be unpacked; the next call tries anew.
        """
        if touched(self.path(digest)):
            return self.path(digest)
        task = self._fetching.get(digest)
        if task is None:
            task = self._fetching[digest] = asyncio.ensure_future(self._fetch(digest, read))
            task.add_done_callback(lambda done: self._forget(digest, done))
        # A caller that gives up must not take the package from the others.
        return await asyncio.shield(task)

    async def make_code_dir(self, digest: str | None, target: str | os.PathLike[str]) -> None:
        """Make ``target``, a writable copy of the package (empty without one); one that is there is left alone."""
        target = Path(target)
        lock = self._locks.setdefault(target, asyncio.Lock())
        async with lock:
            if target.is_dir():
                return
            if digest is not None and not self.path(digest).is_dir():
                raise PackageError(f"package {digest} is not in this node's cache")
            await asyncio.to_thread(make_copy, self.path(digest) if digest else None, target)

    async def shrink(self, keep: int = KEPT_TREES) -> None:
        """Remove all trees but the ``keep`` that were asked for last, and those in use."""
        trees = sorted(self.root.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        # Hidden at once, without a pause in which one of them could be asked for.
        removed = [hide(path) for path in trees[keep:] if not self._in_use[path.name]]
        for hidden in removed:
            if hidden is not None:
                await asyncio.to_thread(erase, hidden)

    async def _fetch(self, digest: str, read: ReadPackage) -> Path:
        final = self.path(digest)
        with temporary_sibling(final) as fresh:
            await download(digest, read, fresh / "package.tar")
            await asyncio.to_thread(unpack, fresh / "package.tar", fresh / "tree")
            try:
                (fresh / "tree").rename(final)
            except OSError:
                # Another process on this node may have been faster; its tree is the same.
                if not final.is_dir():
                    raise
        return final

    def _forget(self, digest: str, task: asyncio.Task[Path]) -> None:
        del self._fetching[digest]
        if not task.cancelled():
            # Looked at, so that asyncio does not complain when every caller has gone.
            task.exception()


def touched(tree: Path) -> bool:
    try:
        os.utime(tree)
    except FileNotFoundError:
        return False
    return True


async def download(digest: str, read: ReadPackage, path: Path) -> None:
    found = hashlib.sha256()
    offset = 0
    with path.open("wb") as file:

        def keep(data: bytes) -> None:
            found.update(data)
            file.write(data)

        async with aclosing(_read_ahead(digest, read)) as pieces:
            async for data in pieces:
                await asyncio.to_thread(keep, data)
                offset += len(data)
    if found.hexdigest() != digest:
        raise PackageError(f"package {digest}: the {offset} bytes that arrived are not its own")


async def _read_ahead(digest: str, read: ReadPackage) -> AsyncGenerator[bytes, None]:
    """Yield all of a package; what comes next is on its way while one is taken care of."""
    offset, ahead = 0, 1  # most packages are one piece
    asked: dict[int, asyncio.Future[bytes]] = {}
    try:
        while True:
            for start in range(offset, offset + ahead * CHUNK_BYTES, CHUNK_BYTES):
                if start not in asked:
                    asked[start] = asyncio.ensure_future(read(digest, start, CHUNK_BYTES))
            data = await asked.pop(offset)
            if not data:
                return
            yield data
            offset += len(data)
            ahead = AHEAD if len(data) == CHUNK_BYTES else 1
            if ahead == 1:  # the end, or a short answer: what was asked for does not fit any more
                await _give_up(asked)
    finally:
        await _give_up(asked)


async def _give_up(asked: dict[int, asyncio.Future[bytes]]) -> None:
    for one in asked.values():
        one.cancel()
    await asyncio.gather(*asked.values(), return_exceptions=True)
    asked.clear()


def make_copy(source: Path | None, target: Path) -> None:
    remove_temporaries(target.parent, target.name, older_than_s=0)
    with temporary_sibling(target) as fresh:
        if source is not None:
            fresh.rmdir()
            copy_tree(source, fresh)
        fresh.rename(target)


def unpack(tar_path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Unpack a package into the new folder ``target``, whole or not at all.

    ``PackageError`` for anything but files, folders and links inside the folder, and for a damaged file.
    """
    target = Path(target)
    if os.path.lexists(target):
        raise PackageError(f"{str(target)!r} is there already; a package is unpacked into a new folder")
    with temporary_sibling(target) as fresh:
        try:
            with tarfile.open(tar_path, "r:", encoding="utf-8", errors="surrogateescape") as tar:
                extract(tar, fresh)
        except DAMAGE as error:
            raise PackageError(f"package {Path(tar_path).name} cannot be unpacked: {error}") from error
        fresh.rename(target)


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, removed at the end unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent))
    try:
        # Made inside, because mkdtemp's own folder is closed to everybody else.
        (holder / "tree").mkdir()
        yield holder / "tree"
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def extract(tar: tarfile.TarFile, root: Path) -> None:
    folders, links = {""}, []
    for member in tar:
        parent, _, name = member.name.rpartition("/")
        # Folders come before what is in them, so a name with "..", an empty part or a link in it has no parent here.
        if parent not in folders or name in ("", ".", ".."):
            raise PackageError(f"package: {member.name!r} is not a path inside the folder")
        place = root / member.name
        if member.isdir():
            folders.add(member.name)
            place.mkdir()
            place.chmod(member.mode & 0o777 | 0o700)
        elif member.isreg() and not member.issparse():
            extract_file(tar, member, place)
        elif member.issym():
            links.append((place, member.linkname))
        else:
            raise PackageError(f"package: {member.name!r} is neither a file, a folder nor a link")
    check_end(tar)
    make_links(root, links)


def extract_file(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with content, open(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, MIB)
        if file.tell() != member.size:
            raise PackageError(f"package: {member.name!r} is cut short")
        os.fchmod(file.fileno(), member.mode & 0o777 | 0o600)


def check_end(tar: tarfile.TarFile) -> None:
    """A tar file ends in zeros; ``tarfile`` takes a damaged header in the middle for the end."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    rest = tar.fileobj.read(MIB)
    if len(rest) < 2 * tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise PackageError("package: the file is damaged or cut short")


def make_links(root: Path, links: Sequence[tuple[Path, str]]) -> None:
    """Make the links last, so that nothing is ever written through one, and then see where each one leads."""
    for place, target in links:
        place.symlink_to(target)
    inside = os.path.realpath(root)
    for place, target in links:
        leads_to = os.path.realpath(place)
        if target.startswith("/") or (leads_to != inside and not leads_to.startswith(inside + "/")):
            raise PackageError(f"package: the link {str(place.relative_to(root))!r} leads out of the folder")


def copy_tree(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a tree into the new folder ``target``, every file its own and writable for the owner."""
    shutil.copytree(source, target, symlinks=True, copy_function=copy_writable)
    for folder, _, _ in os.walk(target):
        Path(folder).chmod(stat.S_IMODE(Path(folder).stat().st_mode) | 0o700)


def copy_writable(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    Path(target).chmod(stat.S_IMODE(Path(source).stat().st_mode) | 0o600)
    return target


def remove_temporaries(folder: Path, name: str | None, older_than_s: float) -> None:
    """Remove what ``temporary_sibling`` left, for targets of this name or of any, when its process was killed."""
    for path in folder.glob(".*.tmp"):
        left_for = path.name.removesuffix(".tmp").rpartition(".")[0]
        if name is None or left_for == f".{name[:100]}":
            try:
                if time.time() - path.lstat().st_mtime >= older_than_s:
                    erase(path)
            except OSError as error:
                log.warning("%s cannot be removed: %s", path, error)
