"""The first process of a test host: sets the host up, reaps, and ends with whoever made the host.

Run as PID 1 of fresh mount, UTS and PID namespaces inside the host's network namespace. The first line on stdin
is the host's description in JSON (see ``network.Hosts``); the end of stdin, or SIGTERM, ends the host: when
PID 1 exits, the kernel kills every other process of the namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 0x2, 0x4, 0x8, 0x1000, 0x4000

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    # Before "ready": a host that is told to end a moment later must not miss it.
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    set_up(json.loads(first_line()))
    print("ready", flush=True)
    serve(wake)


def first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("pid1: no description on stdin")
        line += byte
    return line


def set_up(host: dict[str, Any]) -> None:
    socket.sethostname(host["name"])
    for file in ("hosts", "nsswitch.conf"):
        mount(f"{host['etc']}/{file}", f"/etc/{file}", flags=MS_BIND)
    own_sysfs()
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    cover(host["tmp"], host["home"], [Path(path) for path in host["keep"]])


def own_sysfs() -> None:
    """Mount a sysfs that shows this network namespace's interfaces, with the cgroups where they were."""
    groups = os.open("/sys/fs/cgroup", os.O_PATH)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", flags=MS_BIND | MS_REC)
    os.close(groups)


def cover(tmp: str, home: str, keep: list[Path]) -> None:
    """Give the host a /tmp and a home of its own, in which only the paths in ``keep`` show through.

    A folder above a kept path that other users may not enter is covered too, so that tests can run as an
    unprivileged user what lies in root's home.
    """
    held = {path: os.open(path, os.O_PATH) for path in keep}
    closed = {parent for path in keep for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    covers = {Path("/tmp"), Path(home), *closed}
    outermost = [path for path in covers if not covers & set(path.parents)]
    source = os.open(tmp, os.O_PATH)
    for path in outermost:
        if path == Path("/tmp"):
            mount(f"/proc/self/fd/{source}", "/tmp", flags=MS_BIND)
        else:
            mount("tmpfs", str(path), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for path, descriptor in held.items():
        if set(outermost) & set(path.parents):
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", str(path), flags=MS_BIND | MS_REC)
        os.close(descriptor)
    os.close(source)
    Path(home).mkdir(parents=True, exist_ok=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    failed = libc.mount(
        source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None
    )
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source}: {os.strerror(number)}", target)


def serve(wake: int) -> None:
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if wake in ready and signal.SIGTERM in os.read(wake, 4096):
            return
        reap()


def reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
