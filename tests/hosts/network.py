"""Hosts on one machine: network namespaces on a bridge, each with its own mounts, name and processes.

::

    with Hosts(3) as hosts:
        hosts.start_cluster()                       # Ray on all of them; host 0 is the head
        hosts.run(1, ["hostname"], check=True)      # a command on host 1
        hosts.cut(2); hosts.kill(2)                 # a silent power cut of host 2

To Ray, torch and ssh each is a machine with an address, a name, a ``/tmp``, a ``/dev/shm`` and a root's home of
its own; the rest of the file system is shared. Under ``/tmp`` and the home the hosts see only ``shared``, the
running Python and the folders named in ``keep``, all at their usual paths.

Each host is set up as many real ones are, which is where launchers go wrong: beside ``eth0``, which has the address
that Ray knows, there is ``adm0``, which is up and leads nowhere, and ``docker0``, with the same address on every
host; and a host's own name resolves to 127.0.1.1.

Several sets of hosts live side by side: each claims a number, and with it names and a subnet. The claim ends with
the process that made it, and its hosts with it; what such a process leaves behind (it was killed) the next one to
claim the number removes. Needs root.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from tests.support import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOOLS = ("ip", "nsenter", "unshare", "setpriv")
GCS_PORT = 6379

# What a login on a plain Debian host has: no virtual environment, nothing of whoever runs the tests.
ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}

# Settings of `ray start`: a dead node is noticed within about 5 s, a silent one within about 16 s.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_grpc_client_keepalive_timeout_ms": "16000",
}


def why_no_hosts() -> str | None:
    """Say why hosts cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"rc-try-{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if added.returncode != 0:
        return f"network namespaces are not allowed here: {added.stderr.strip()}"
    ip("netns", "del", name)
    return None


class HostProcess(subprocess.Popen[str]):
    """A command on a host. Signals go to the command itself, not to the ``nsenter`` that waits for it."""

    def send_signal(self, sig: int) -> None:
        for process in self._inside() or [self.pid]:
            try:
                os.kill(process, sig)
            except ProcessLookupError:
                pass

    def end(self) -> None:
        """Kill the command and all that descends from it."""
        for process in descendants(self.pid):
            kill(process)
        self.wait()

    def _inside(self) -> list[int]:
        try:
            return [child.pid for child in psutil.Process(self.pid).children()]
        except psutil.NoSuchProcess:
            return []


@dataclass
class Host:
    name: str
    ip: str
    link: str
    folder: Path
    guard: subprocess.Popen[str] | None = None
    pid1: int | None = None
    ray_options: dict[str, Any] = field(default_factory=dict)

    @property
    def tmp(self) -> Path:
        """What the host sees as ``/tmp``."""
        return self.folder / "tmp"


class Hosts:
    """``count`` hosts, up from ``start`` (or entering ``with``) to ``stop``. Host ``i`` has the address ``ip(i)``.

    ``keep`` are folders below ``/tmp`` or the home that the hosts see too. With ``ipv6`` ``eth0`` has no IPv4 address.
    """

    def __init__(self, count: int, keep: Sequence[Path] = (), *, ipv6: bool = False) -> None:
        self.count = count
        self.ipv6 = ipv6
        self.hosts: list[Host] = []
        self._keep = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *keep]
        self._claim: socket.socket | None = None
        self._number = -1

    def __enter__(self) -> Hosts:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- making and removing

    def start(self) -> None:
        self._claim, self._number = claim()
        clear(self._number)
        try:
            self.folder.mkdir(mode=0o755)
            self.shared.mkdir()
            self.shared.chmod(0o1777)
            ip("link", "add", self.bridge, "type", "bridge")
            ip("addr", "add", f"{subnet(self._number)}.1/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for _ in range(self.count):
                self.add()
        except BaseException:
            self.stop()
            raise

    def add(self) -> int:
        """One more host; returns its number. It has no Ray yet."""
        i = len(self.hosts)
        name = f"{prefix(self._number)}{i}"
        host = Host(name, self._address(i), f"v{name}", self.folder / name)
        host.folder.mkdir()
        host.tmp.mkdir()
        host.tmp.chmod(0o1777)
        self.hosts.append(host)
        self._write_names()
        (host.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        self._add_traps(name, i)
        ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", host.link, "master", self.bridge, "up")
        ip("-n", name, "link", "set", "eth0", "up")
        if self.ipv6:
            ip("-n", name, "addr", "add", f"{host.ip}/64", "dev", "eth0", "nodad")
        else:
            ip("-n", name, "addr", "add", f"{host.ip}/24", "dev", "eth0")
            ip("-n", name, "route", "add", "default", "via", f"{subnet(self._number)}.1")
        self.boot(i)
        return i

    def _address(self, i: int) -> str:
        return f"fd78::{self._number:x}:{10 + i:x}" if self.ipv6 else f"{subnet(self._number)}.{10 + i}"

    def _add_traps(self, name: str, i: int) -> None:
        """Interfaces that are up and have addresses, and by which no other host can be reached."""
        ip("-n", name, "link", "add", "adm0", "type", "veth", "peer", "name", "adm0-end")
        ip("-n", name, "addr", "add", f"10.79.0.{10 + i}/24", "dev", "adm0")
        ip("-n", name, "link", "add", "docker0", "type", "bridge")
        ip("-n", name, "link", "add", "veth1", "type", "veth", "peer", "name", "veth1-end")
        ip("-n", name, "link", "set", "veth1", "master", "docker0")
        ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        for link in ("adm0", "adm0-end", "veth1", "veth1-end", "docker0"):
            ip("-n", name, "link", "set", link, "up")

    def stop(self) -> None:
        """Remove everything that ``start`` and the hosts made; safe to call twice."""
        if self._claim is None:
            return
        for i, host in enumerate(self.hosts):
            if host.guard is not None:
                self.kill(i)
        self.hosts.clear()
        clear(self._number)
        self._claim.close()
        self._claim = None

    # -- about a host

    @property
    def folder(self) -> Path:
        return state_folder(self._number)

    @property
    def shared(self) -> Path:
        """A folder that all hosts (and this process) see at the same path, open to every user."""
        return self.folder / "shared"

    @property
    def bridge(self) -> str:
        return f"{prefix(self._number)}br"

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"[{self.ip(0)}]:{GCS_PORT}" if self.ipv6 else f"{self.ip(0)}:{GCS_PORT}"

    def ip(self, i: int) -> str:
        return self.hosts[i].ip

    def name(self, i: int) -> str:
        return self.hosts[i].name

    def up(self, i: int) -> bool:
        return self.hosts[i].pid1 is not None

    def pids(self, i: int | None = None) -> list[int]:
        """The processes of host ``i`` (of all hosts), in this process's numbering, without their PID 1."""
        wanted = self.hosts if i is None else [self.hosts[i]]
        spaces = {network_of(host.pid1) for host in wanted if host.pid1 is not None} - {None}
        first = {host.pid1 for host in self.hosts} | {host.guard.pid for host in self.hosts if host.guard}
        return [pid for pid in psutil.pids() if pid not in first and network_of(pid) in spaces]

    # -- running commands

    def popen(
        self,
        i: int,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        user: str | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
    ) -> HostProcess:
        """Start ``argv`` on host ``i``. ``env`` is added to that of a plain login; as ``user`` HOME is a folder of theirs."""
        pid1 = self.hosts[i].pid1
        assert pid1 is not None, f"host {i} is down"
        enter = ["nsenter", f"--target={pid1}", "--net", "--mount", "--uts", "--pid", "--"]
        become = (
            [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={group(user)}", "--init-groups"]
        )
        return HostProcess(
            [*enter, *become, "env", f"--chdir={cwd}", *map(str, argv)],
            env={**ENVIRONMENT, **self._user_environment(user), **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self,
        i: int,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        user: str | None = None,
        stdin: str | None = None,
        timeout_s: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on host ``i`` to its end; at ``timeout_s`` its whole process tree is killed and it fails."""
        given = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
        process = self.popen(i, argv, env=env, cwd=cwd, user=user, stdin=given)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except BaseException:
            process.end()
            raise
        finished = subprocess.CompletedProcess(list(map(str, argv)), process.returncode, stdout, stderr)
        assert not (check and finished.returncode), (
            f"{finished.args} on host {i}: exit {finished.returncode}\n{stdout[-4000:]}\n{stderr[-4000:]}"
        )
        return finished

    # -- Ray

    def start_cluster(self, **options: Any) -> None:
        """Start Ray on every host, host 0 as the head; ``options`` as of ``start_ray``."""
        head = self._ray_start(0, **options)
        wait_until(lambda: self._gcs_answers() or head.poll() is not None, 90, "Ray's head is listening")
        starting = [head, *(self._ray_start(i, **options) for i in range(1, len(self.hosts)))]
        for i, process in enumerate(starting):
            started(i, process)

    def start_ray(self, i: int, **options: Any) -> None:
        """Start Ray on host ``i``: as the head on host 0, else joining it.

        ``cpus`` (4) and ``gpus`` (8), ``env`` (more of it for `ray start`), ``arguments`` (more of them), ``labels`` (those
        of each host, by its number), ``user``, ``ray`` (the command). Without any of them: as it was last started there.
        """
        started(i, self._ray_start(i, **(options or self.hosts[i].ray_options)))

    def _ray_start(self, i: int, **options: Any) -> HostProcess:
        self.hosts[i].ray_options = options
        if "labels" in options:
            options = {
                **options,
                "arguments": [*options.get("arguments", ()), "--labels", options["labels"][i]],
            }
        return self.popen(i, ray_arguments(self.ip(i), self.address, **options), **ray_process(options))

    def _gcs_answers(self) -> bool:
        probe = f"import socket; socket.create_connection(({self.ip(0)!r}, {GCS_PORT}), 1)"
        return self.run(0, [sys.executable, "-I", "-S", "-c", probe]).returncode == 0

    # -- faults

    def cut(self, i: int) -> None:
        """Pull the network cable: no packet passes, nobody is told."""
        ip("link", "set", self.hosts[i].link, "down")

    def mend(self, i: int) -> None:
        """Put the cable back."""
        ip("link", "set", self.hosts[i].link, "up")

    def kill(self, i: int) -> None:
        """Crash the host: all its processes end at once; its peers get a reset (none after ``cut``: a power cut)."""
        host = self.hosts[i]
        assert host.guard is not None, f"host {i} is down"
        if host.pid1 is not None and host.guard.poll() is None:
            kill(host.pid1)
        host.guard.wait(timeout=30)  # it ends when PID 1 has, and PID 1 is the last of its namespace
        for stream in (host.guard.stdin, host.guard.stdout):
            if stream is not None:
                stream.close()
        host.guard = host.pid1 = None

    def boot(self, i: int) -> None:
        """Start the host, with an empty ``/tmp`` (so without Ray)."""
        host = self.hosts[i]
        assert host.guard is None, f"host {i} is up"
        shutil.rmtree(host.tmp)
        host.tmp.mkdir()
        host.tmp.chmod(0o1777)
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        python = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pid1.py"))]
        with (host.folder / "pid1.log").open("a") as log:
            host.guard = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{host.name}", "--", *unshare, *python],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert host.guard.stdin is not None and host.guard.stdout is not None
        host.guard.stdin.write(json.dumps(self._description(host)) + "\n")
        host.guard.stdin.flush()
        answer = host.guard.stdout.readline()
        assert answer == "ready\n", f"host {i} did not come up: {(host.folder / 'pid1.log').read_text()}"
        host.pid1 = psutil.Process(host.guard.pid).children()[0].pid

    # -- helpers

    def _description(self, host: Host) -> dict[str, Any]:
        keep = {str(path.resolve()) for path in [*self._keep, self.shared]}
        return {
            "name": host.name,
            "etc": str(host.folder),
            "tmp": str(host.tmp),
            "home": ENVIRONMENT["HOME"],
            "keep": sorted(keep),
        }

    def _write_names(self) -> None:
        for host in self.hosts:
            others = "".join(f"{other.ip} {other.name}\n" for other in self.hosts if other is not host)
            # Written in place: the hosts that are up have this file mounted. The second line is Debian's.
            (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")

    def _user_environment(self, user: str | None) -> dict[str, str]:
        if user is None:
            return {}
        home = self.shared / f"home-{user}"
        if not home.exists():
            home.mkdir(mode=0o700)
            shutil.chown(home, user, group(user))
        return {"HOME": str(home), "USER": user, "LOGNAME": user}


def ray_arguments(
    node_ip: str,
    address: str,
    *,
    cpus: int = 4,
    gpus: int = 8,
    arguments: Sequence[str] = (),
    ray: Path = BIN / "ray",
    **_: Any,
) -> list[str]:
    """The `ray start` line of one host, by absolute path, as an operator without an activated environment writes it."""
    host, port = address.rsplit(":", 1)
    place = [f"--address={address}"]
    if node_ip == host.strip("[]"):
        place = ["--head", f"--port={port}", "--dashboard-host=0.0.0.0"]
    return [
        str(ray),
        "start",
        *place,
        f"--node-ip-address={node_ip}",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
        "--object-store-memory=100000000",
        "--disable-usage-stats",
        *arguments,
    ]


def ray_process(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "env": {**RAY_ENVIRONMENT, **options.get("env", {})},
        "user": options.get("user"),
        "stderr": subprocess.STDOUT,
    }


def started(i: int, process: HostProcess) -> None:
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        process.end()
        raise
    assert process.returncode == 0, f"`ray start` on host {i}: exit {process.returncode}\n{output[-4000:]}"


# -- names, claims and what they left behind


def prefix(number: int) -> str:
    return f"rch{number}-"


def subnet(number: int) -> str:
    return f"10.78.{number}"


def state_folder(number: int) -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"rc-hosts-{number}"


def claim() -> tuple[socket.socket, int]:
    """The lowest free number, and the socket that holds it: its abstract name is free again when this process ends."""
    for number in range(1, 250):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0raycontrol-test-hosts-{number}")
        except OSError:
            holder.close()
        else:
            return holder, number
    raise RuntimeError("no number is free for another set of test hosts")


def clear(number: int) -> None:
    """Remove processes, namespaces, links and files of the hosts that had this number; wait until they are gone."""
    for name in namespaces(number):
        for pid in ip("netns", "pids", name).split():
            kill(int(pid))
        ip("netns", "del", name)
    for link in links(number):
        # A veth's other end may be on its way out with its namespace and take this one along.
        subprocess.run(["ip", "link", "del", link], capture_output=True)
    wait_until(lambda: not links(number), 20, f"the links of {prefix(number)} are gone")
    folder = state_folder(number)
    if folder.exists():
        shutil.rmtree(folder)


def namespaces(number: int) -> list[str]:
    names = [entry["name"] for entry in json.loads(ip("-json", "netns", "list") or "[]")]
    return [name for name in names if name.startswith(prefix(number))]


def links(number: int) -> list[str]:
    names = [entry["ifname"] for entry in json.loads(ip("-json", "link", "show") or "[]")]
    return [name for name in names if name.startswith((prefix(number), f"v{prefix(number)}"))]


def ip(*arguments: str) -> str:
    finished = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert finished.returncode == 0, f"ip {' '.join(arguments)}: {finished.stderr.strip()}"
    return finished.stdout


# -- processes


def network_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
