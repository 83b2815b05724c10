"""Packs a job's working directory into one file, known by the digest of its bytes.

A package is a plain tar file made so that equal trees give equal bytes: sorted names, no times, no owners. It is not
compressed, because zlib's output differs between versions and the cluster's own network is fast.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import stat
import tarfile
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from raycontrol import ignore
from raycontrol.disk import sha256
from raycontrol.errors import PackageError
from raycontrol.logs import MIB

CAP_BYTES = 512 * MIB
MOST_ENTRIES = 200_000
IGNORE_FILES = (".gitignore", ".rayignore")
"""In this order: a line of ``.rayignore`` wins over one of the same folder's ``.gitignore``."""

CHUNK_BYTES = 4 * MIB

PutPackage = Callable[[str, int, bytes, bool], Awaitable[int]]
"""``put(digest, offset, data, last) -> held``: see ``Archive.put_package``."""


@dataclass(frozen=True)
class Package:
    """A packed folder: a temporary tar file at ``path`` (``size`` bytes), removed at the end of a ``with`` block.

    ``files`` counts regular files; ``warnings`` says, a sentence each, what was left out that no rule named.
    """

    path: Path
    digest: str
    files: int
    size: int
    warnings: tuple[str, ...] = ()

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Entry:
    """Something to pack: ``name`` is its path below the folder, ``target`` set for links."""

    name: str
    path: str
    found: os.stat_result
    target: str | None = None


def pack(
    folder: str | os.PathLike[str], cap_bytes: int = CAP_BYTES, *, leave_out: Sequence[Path] = ()
) -> Package:
    """Pack ``folder`` into a temporary file, less ``.git`` and what ``.gitignore`` and ``.rayignore`` name.

    ``.gitignore`` files above the folder count too, up to the repository's root. ``leave_out`` names folders that
    are never packed (``RAYCONTROL_HOME``). Links that stay inside are kept, made relative; others, sockets and
    devices are left out with a warning, and so is what vanishes meanwhile. ``PackageError``: no folder, the home
    folder or one above it, ``/``, more than ``cap_bytes`` (found before anything is read) or 200,000 entries,
    something unreadable, no room for the temporary file.
    """
    root = checked_folder(folder)
    warnings: list[str] = []
    entries = Walk(root, cap_bytes, {os.path.realpath(path) for path in leave_out}, warnings).entries()
    with told_of_temporary_files(root):
        handle, name = tempfile.mkstemp(prefix="raycontrol-", suffix=".tar")
        os.close(handle)
        path = Path(name)
        try:
            files = write_tar(path, entries, warnings)
            return Package(path, sha256(path), files, path.stat().st_size, tuple(warnings))
        except BaseException:
            path.unlink(missing_ok=True)
            raise


@contextmanager
def told_of_temporary_files(root: Path) -> Iterator[None]:
    """Tell what went wrong there in our words; the folder's own faults are told where they come up."""
    try:
        yield
    except OSError as error:
        raise PackageError(f"working_dir: no temporary file of {str(root)!r} can be made: {error}") from error


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    given, root = os.fspath(folder), Path(os.path.realpath(folder))
    if not os.path.isdir(root):  # noqa: PTH112 (that one raises where a folder above may not be entered)
        found = os.path.exists(root)  # noqa: PTH110 (as above)
        what = "is not a folder" if found else "does not exist, or is in a folder that you may not enter"
        raise PackageError(f"working_dir: {given!r} {what}")
    homes = {Path(os.path.realpath(home)) for home in (Path.home(), pwd_home())}
    for home in homes:
        if root == home or root in home.parents:
            what = "the root of the file system" if root == Path("/") else "the home folder or one above it"
            raise PackageError(
                f"working_dir: {given!r} is {what}; make a folder for the job's code and name that"
            )
    return root


def pwd_home() -> Path:
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")


class Walk:
    """One walk over a folder, breadth first, so that the sizes of large top-level entries are met early."""

    def __init__(self, root: Path, cap_bytes: int, leave_out: set[str], warnings: list[str]) -> None:
        self._root = str(root)
        self._cap_bytes = cap_bytes
        self._leave_out = leave_out
        self._warnings = warnings
        self._found: list[Entry] = []
        self._sizes: Counter[str] = Counter()
        self._size = 0

    def entries(self) -> list[Entry]:
        """What to pack, sorted by name in bytes: a folder before what is in it."""
        waiting = deque([(self._root, rules_above(self._root))])
        while waiting:
            folder, rules = waiting.popleft()
            found = scan(folder)
            rules = (*rules, *rules_in(folder))
            for item in found:
                try:
                    if self._wants(item, rules) and item.is_dir(follow_symlinks=False):
                        waiting.append((item.path, rules))
                except FileNotFoundError:
                    self._warnings.append(vanished(self._name(item)))
                except OSError as error:
                    raise unreadable(item.path, error) from error
        return sorted(self._found, key=lambda entry: os.fsencode(entry.name))

    def _wants(self, item: os.DirEntry[str], rules: Sequence[ignore.Rules]) -> bool:
        is_folder = item.is_dir(follow_symlinks=False)
        return not self._is_left_out(item, is_folder, rules) and self._take(item, is_folder)

    def _name(self, item: os.DirEntry[str]) -> str:
        return item.path[len(self._root.rstrip("/")) + 1 :]

    def _is_left_out(self, item: os.DirEntry[str], is_folder: bool, rules: Sequence[ignore.Rules]) -> bool:
        if item.name == ".git" or item.path in self._leave_out:
            return True
        return ignore.is_ignored(os.fsencode(item.path), is_folder, rules)

    def _take(self, item: os.DirEntry[str], is_folder: bool) -> bool:
        name = self._name(item)
        found = item.stat(follow_symlinks=False)
        target = None
        if stat.S_ISLNK(found.st_mode):
            target = inner_target(self._root, Path(item.path))
            if target is None:
                self._warnings.append(f"{name!r} is a link that leads outside; it is left out")
                return False
        elif not is_folder and not stat.S_ISREG(found.st_mode):
            self._warnings.append(f"{name!r} is neither a file nor a folder; it is left out")
            return False
        elif not is_folder:
            top, slash, _ = name.partition("/")
            self._sizes[top + slash] += found.st_size
            self._size += found.st_size
        self._found.append(Entry(name, item.path, found, target))
        self._check_size()
        return True

    def _check_size(self) -> None:
        # The running sum is compared after every entry, so that a huge folder is refused after a part of it.
        if self._size <= self._cap_bytes and len(self._found) <= MOST_ENTRIES:
            return
        rule = f"{self._cap_bytes / MIB:g} MiB"
        if len(self._found) > MOST_ENTRIES:
            rule = f"{MOST_ENTRIES} files and folders"
        largest = ", ".join(f"{name} ({size / MIB:.1f} MiB)" for name, size in self._sizes.most_common(3))
        raise PackageError(
            f"working_dir: {self._root!r} holds more than {rule}; the largest found so far: {largest}. Name what "
            "the job does not need in .rayignore, or keep data on a path that every node has"
        )


def rules_above(root: str) -> tuple[ignore.Rules, ...]:
    """The rules of the folders above ``root``, outermost first, if it lies in a git repository."""
    above = Path(root).parents
    # With os.path, because pathlib raises where a folder above may not be entered.
    is_repository = os.path.exists
    repository = next((folder for folder in (Path(root), *above) if is_repository(folder / ".git")), None)
    if repository is None or repository == Path(root):
        return ()
    inside = [folder for folder in above if folder == repository or repository in folder.parents]
    return tuple(rules for folder in reversed(inside) for rules in rules_in(str(folder), IGNORE_FILES[:1]))


def rules_in(folder: str, names: Sequence[str] = IGNORE_FILES) -> tuple[ignore.Rules, ...]:
    texts = []
    for name in names:
        path = Path(folder, name)
        try:
            if path.is_file():
                texts.append(path.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unreadable(str(path), error) from error
    return (ignore.parse(b"\n".join(texts), os.fsencode(folder)),) if texts else ()


def scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: os.fsencode(item.name))
    except FileNotFoundError:
        return []  # it went after it was found; what is known of it is that it was there
    except OSError as error:
        raise unreadable(folder, error) from error


def vanished(name: str) -> str:
    return f"{name!r} vanished while the folder was packed; it is left out"


def unreadable(path: str, error: OSError) -> PackageError:
    why = error.strerror or "it changed while it was packed"
    return PackageError(f"working_dir: {path!r} cannot be read: {why}")


def inner_target(root: str, link: Path) -> str | None:
    """Where a link points, as a path from its own folder; ``None`` when that is outside ``root``.

    A link that is absolute, or that leaves the folder and comes back by the folder's name, would lead elsewhere on
    another node: it is written anew.
    """
    written, leads_to = str(link.readlink()), os.path.realpath(link)
    if leads_to != root and not leads_to.startswith(root + "/"):
        return None
    below = os.path.normpath(link.parent.relative_to(root) / written)
    if below.startswith("/") or below.split("/")[0] == "..":
        return os.path.relpath(leads_to, link.parent)
    return written


def write_tar(path: Path, entries: Sequence[Entry], warnings: list[str]) -> int:
    """Write the entries that are still there; returns how many files they were."""
    files = 0
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for entry in entries:
            if stat.S_ISREG(entry.found.st_mode):
                files += add_file(tar, entry, warnings)
            else:
                add(tar, entry)
    return files


def add_file(tar: tarfile.TarFile, entry: Entry, warnings: list[str]) -> bool:
    """Add a file as it is now, up to the size that it was found with; False if it has gone."""
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        warnings.append(vanished(entry.name))
        return False
    except OSError as error:
        raise unreadable(entry.path, error) from error
    try:
        tar.addfile(
            info_of_file(entry, os.fstat(descriptor).st_size), cast(IO[bytes], Source(descriptor, entry.path))
        )
    finally:
        os.close(descriptor)
    return True


def info_of_file(entry: Entry, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.mode = stat.S_IMODE(entry.found.st_mode) & 0o777 | 0o600
    info.size = min(entry.found.st_size, size)
    return info


class Source:
    """A file to be packed, whose faults are told from those of the temporary file that it goes into."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        parts = []
        while size > 0:
            try:
                data = os.read(self._descriptor, size)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not data:
                raise unreadable(self._path, OSError())
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def add(tar: tarfile.TarFile, entry: Entry) -> None:
    """Add a folder or link: of its attributes only the permission bits count, all of them set for the owner."""
    info = tarfile.TarInfo(entry.name)
    if entry.target is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
    else:
        info.type, info.mode = tarfile.DIRTYPE, stat.S_IMODE(entry.found.st_mode) & 0o777 | 0o700
    tar.addfile(info)


async def upload(package: Package, put: PutPackage) -> None:
    """Hand a package to the archive, going on from what it holds; a damaged upload is sent once more."""
    try:
        await upload_once(package, put)
    except PackageError:
        await upload_once(package, put)


async def upload_once(package: Package, put: PutPackage) -> None:
    with package.path.open("rb") as file:
        held = await put(package.digest, 0, b"", False)
        while True:
            data = await asyncio.to_thread(os.pread, file.fileno(), CHUNK_BYTES, held)
            last = held + len(data) >= package.size
            before, held = held, await put(package.digest, held, data, last)
            if last and held >= package.size:
                return
            if held == before:
                raise PackageError(f"package {package.digest}: the archive takes nothing past {held} bytes")
