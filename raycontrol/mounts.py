"""Mounts for one process and what it starts: folders and files of the node appear under other paths, for nobody else.

``supervisor`` loads this file in the process that will become the command, and only where there is something to mount.
Every run makes its own mounts: a bind mount shows the same files wherever it is made, so that all runs of an instance see
the same without a process that would have to hold a namespace for them.

A target that does not exist is made inside the namespace: its nearest folder that does is covered with an empty one, the
old entries are bound back into it, and what is missing is added. The cover itself is read-only, because what was written
into it would be gone with the run; the old entries are as they were.

Without root the mounts are made in a user namespace, in which the user keeps his ids; those of others show as `nobody`,
and `sudo` does not work there.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH110, PTH112, PTH115, PTH116, PTH120, PTH208, PTH211
# (a program's part; paths are bytes)
from __future__ import annotations

import ctypes
import errno
import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 1, 32, 4096, 8192, 16384, 1 << 19
MS_RELATIME, MS_STRICTATIME = 1 << 21, 1 << 24
SAME_BITS = 2 | 4 | 8 | 16 | 1024 | 2048
"""nosuid, nodev, noexec, synchronous, noatime, nodiratime: what statvfs(3) and mount(2) write alike."""
ST_RELATIME = 4096
MOST_ENTRIES = 2000
"""Of a folder that is to be covered: each costs a mount in every run."""
SHARED = 0o1000
"""The sticky bit: a folder in which anybody makes files, such as /tmp, which nobody may be kept from."""
REFUSED = (
    "this user may not make mounts here ({reason}). It takes root, in a container with CAP_SYS_ADMIN, or a kernel that lets "
    "users make user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)


class MountError(Exception):
    """A mount could not be made; its text names the paths."""


def make(wanted: Sequence[tuple[bytes, bytes, bool]]) -> None:
    """Give this process mounts of its own: source, target, whether it is read-only. The working directory becomes ``/``."""
    _own_namespace()
    sources = [_opened(source, target) for source, target, _ in wanted]
    covers: list[bytes] = []
    order = sorted(range(len(wanted)), key=lambda number: wanted[number][1])
    for number in order:
        source, target, _ = wanted[number]
        try:
            _make_room(target, _is_folder(sources[number]), covers)
            _mount(_path_of(sources[number]), target, MS_BIND | MS_REC)
        except OSError as error:
            raise MountError(
                f"{_shown(source)} cannot be mounted at {_shown(target)}: {error.strerror}"
            ) from error
    for _, target, read_only in wanted:
        if read_only:
            _make_read_only(target, below=True)
    for cover in covers:
        _make_read_only(cover, below=False)
    for source_fd in sources:
        os.close(source_fd)
    os.chdir("/")


def _own_namespace() -> None:
    """Leave the namespace of the host: it sees nothing of ours, we see what it mounts later."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        try:
            _unshare(CLONE_NEWNS)
        except PermissionError:
            _unshare(CLONE_NEWNS | CLONE_NEWUSER)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        _mount(None, b"/", MS_REC | MS_SLAVE)
    except OSError as error:
        raise MountError(REFUSED.format(reason=error.strerror)) from error


def _opened(source: bytes, target: bytes) -> int:
    """Hold the source as it is before anything is mounted over it."""
    try:
        return os.open(source, os.O_PATH)
    except OSError as error:
        raise MountError(f"{_shown(source)}, to be mounted at {_shown(target)}: {error.strerror}") from error


# Room for what does not exist.


def _make_room(target: bytes, folder: bool, covers: list[bytes]) -> None:
    """Make sure that ``target`` exists, inside the namespace only."""
    if os.path.exists(target):
        return
    parent = os.path.dirname(target)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    if not any(_is_at_or_below(parent, cover) and _device(parent) == _device(cover) for cover in covers):
        _cover(parent, target)
        covers.append(parent)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if folder:
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))


def _cover(folder: bytes, target: bytes) -> None:
    """Put an empty folder over this one, and its entries back into it."""
    entries = os.listdir(folder)
    mode = os.stat(folder).st_mode
    if mode & SHARED or len(entries) > MOST_ENTRIES:
        why = "in which programs make files" if mode & SHARED else f"which has {len(entries)} entries"
        raise MountError(
            f"{_shown(target)} does not exist, nor can it be made in {_shown(folder)}, {why}: make it on the node, "
            "as an empty folder (or file)"
        )
    old = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    if folder == b"/":
        _mount(b"tmpfs", b"/tmp", 0, b"tmpfs", b"mode=755")
        os.chdir(b"/tmp")
        _mount(b".", b"/", MS_MOVE)
    else:
        _mount(b"tmpfs", folder, 0, b"tmpfs", b"mode=755")
        os.chdir(folder)
    for entry in entries:
        _put_back(_path_of(old) + b"/" + entry, entry)
    os.chmod(b".", stat.S_IMODE(mode))
    if folder == b"/":
        os.chroot(b".")  # which is the root of this namespace now
    os.close(old)


def _put_back(old: bytes, entry: bytes) -> None:
    """Show one entry of a covered folder in the current one, which covers it."""
    mode = os.lstat(old).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(old), entry)
        return
    if stat.S_ISDIR(mode):
        os.mkdir(entry)
    else:
        os.close(os.open(entry, os.O_WRONLY | os.O_CREAT, 0o644))
    _mount(old, entry, MS_BIND | MS_REC)


# Read-only.


def _make_read_only(target: bytes, below: bool) -> None:
    """Make the mount at ``target`` read-only and, with ``below``, all that are mounted in it. Other flags stay."""
    place = os.path.realpath(target)
    for point in _mount_points() if below else [place]:
        if _is_at_or_below(point, place):
            try:
                _mount(None, point, MS_REMOUNT | MS_BIND | MS_RDONLY | _flags_of(point))
            except OSError as error:
                raise MountError(f"{_shown(point)} cannot be made read-only: {error.strerror}") from error


def _mount_points() -> list[bytes]:
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split(b" ")[4] for line in file]
    return [re.sub(rb"\\(\d{3})", lambda match: bytes([int(match[1], 8)]), field) for field in fields]


def _flags_of(point: bytes) -> int:
    """The flags that a mount has: in a user namespace they must be given again."""
    flags = os.statvfs(point).f_flag
    relative = MS_RELATIME if flags & ST_RELATIME else 0
    strict = 0 if flags & (ST_RELATIME | 1024) else MS_STRICTATIME
    return flags & SAME_BITS | relative | strict


# Small parts.


def _is_at_or_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")


def _is_folder(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def _device(path: bytes) -> int:
    return os.stat(path).st_dev


def _path_of(fd: int) -> bytes:
    return b"/proc/self/fd/%d" % fd


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)))


def _mount(
    source: bytes | None, target: bytes, flags: int, kind: bytes | None = None, data: bytes | None = None
) -> None:
    _checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno() or errno.EIO
        raise OSError(number, os.strerror(number))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


_libc = ctypes.CDLL(None, use_errno=True)
