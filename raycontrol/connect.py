"""Ray, as a client sees it: finding a cluster, joining it as a driver, starting one for a single run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycontrol import rayauth, raysettings
from raycontrol.errors import (
    ClusterUnreachable,
    ControllerUnavailable,
    HeadFault,
    RaycontrolError,
    UsageError,
)
from raycontrol.execution import Place
from raycontrol.job import EMBEDDED
from raycontrol.settings import Settings

log = logging.getLogger(__name__)

TCP_TRY_S = 3.0
GREETING_S = 5.0
CALL_S = 60.0
START_S = 60.0
RESTART_POLL_S = 0.1
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""What every client of a gRPC server says first: the preface of HTTP/2 and an empty SETTINGS frame (RFC 9113, 3.4)."""


def find_address(settings: Settings, explicit: str | None = None) -> str | None:
    """Return the address of the cluster to use, or None when there is none.

    In this order: ``explicit``, RAY_ADDRESS, the cluster that was started on this machine, if it answers. Never
    "any Ray that can be found": that may be the nested one of a job. And never the cluster of another user of this
    machine: whoever connects trusts what he is sent.
    """
    chosen = explicit or settings.address
    if chosen and chosen not in ("auto", "local"):
        return chosen
    if chosen == "local":
        return None
    address = _noted(Path(settings.ray_tmpdir) / "ray" / "ray_current_cluster")
    return address if address and _trouble(address) is None else None


class Session:
    """A connection to a cluster as one of its drivers, or a cluster of this process's own (``embedded``).

    Ray allows one per process: a second session to the same address shares it, to another is refused.
    """

    def __init__(self, settings: Settings, address: str | None, *, embedded: bool) -> None:
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = (
            "0"  # else a late call after `close` would start a Ray of its own
        )
        self.settings = settings
        self.embedded = embedded
        self._owner = True
        self._closing = ExitStack()
        if embedded:
            self._start_ray()
            self.cluster_name = f"{EMBEDDED}{secrets.token_hex(6)}"
        else:
            self._join(address)
            self.cluster_name = settings.cluster or self._gcs_address()

    def controller(self) -> Any:
        """Return the cluster's controller, started if there is none, once versions have been compared.

        A detached actor inherits from the driver that makes it: its runtime_env, where it looks for modules. So the
        controller is made by a process of our own, where this one is a driver that somebody else has set up. Raises VersionMismatch, StoreError, ControllerUnavailable.
        """
        from raycontrol.cluster import cluster_address, controller_handle, existing_controller
        from raycontrol.version import __version__

        if not self._owner and existing_controller() is None:
            start_elsewhere(cluster_address(), replace(self.settings, cluster=self.cluster_name))
        handle = controller_handle(self.settings.home, self.cluster_name)
        self.get(handle.hello.remote(__version__), START_S)
        return handle

    def existing_controller(self, *, any_version: bool = False) -> Any | None:
        """Return the cluster's controller if it has one; nothing is started. Raises VersionMismatch unless ``any_version``."""
        from raycontrol.cluster import existing_controller
        from raycontrol.version import __version__

        handle = existing_controller()
        if handle is not None and not any_version:
            self.get(handle.hello.remote(__version__), START_S)
        return handle

    def told_doubts(self, lacking: str | None) -> str | None:
        """Return what is to be told of what the cluster as it is lacks for a job, if it lacks anything.

        Raises UsageError instead when the cluster is embedded: no node will join it.
        """
        if lacking is None:
            return None
        if self.embedded:
            raise UsageError(f"the Ray of this run is this machine alone: {lacking}")
        return f"{lacking}; until that changes, the job waits (`timeouts.queue_s` limits that)"

    def archive(self) -> Any:
        """Return the archive, which the controller has started."""
        from raycontrol.actors import archive_handle

        return archive_handle()

    def actor_of(self, place: Place) -> Any:
        """Return the actor of a node or an instance; raises ControllerUnavailable where there is none (any more)."""
        import ray

        from raycontrol.actors import NAMESPACE, actor_name

        try:
            return ray.get_actor(actor_name(place), NAMESPACE)
        except ValueError:  # Ray's word for a name that nobody has
            raise ControllerUnavailable(f"{place.name} has not begun yet, or has ended") from None

    def way(self) -> Any:
        """Return the way to the actors that run commands across nodes (``spread.Way``)."""
        from raycontrol.actors import Way

        return Way()

    def restart_controller(self) -> Any:
        """End the controller's process, and those of archive and nodes; Ray starts them again, with the code that is
        installed now. Jobs run on.
        """
        import ray

        from raycontrol.cluster import existing_controller, renew_servants

        handle = existing_controller()
        renew_servants()
        if handle is not None:
            former = self._pid(handle)
            ray.kill(handle, no_restart=False)
            # What is asked before it is dead, it still answers: as what it was.
            wait_for_another(former, lambda: self._pid(handle), START_S)
        return self.controller()

    def _pid(self, controller: Any) -> int | None:
        """Return the process that answers, of whatever version; None when none does as it should."""
        try:
            return int(self.get(controller.status.remote(), START_S)["pid"])
        except RaycontrolError:
            return None

    def get(self, reference: Any, timeout_s: float = CALL_S) -> Any:
        """Return the result of a call, or raise its error as it was raised on the other side."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RaycontrolError):
                raise error.cause from None
            fault = head_fault(error.cause)
            log.error("%s", fault, exc_info=error)  # the traceback of the other side is told nowhere else
            raise fault from error
        except GetTimeoutError:
            raise ControllerUnavailable(
                f"no answer within {timeout_s:g} s; `raycontrol controller status` tells if it runs"
            ) from None
        except RayActorError as error:
            raise ControllerUnavailable(f"raycontrol's actor on the head is gone: {error}") from error
        except RayError as error:
            raise ControllerUnavailable(f"the connection to the cluster failed: {error}") from error

    def close(self) -> None:
        """Leave the cluster; end it if it is this process's own."""
        if not self._owner:
            return
        import ray

        ray.shutdown()
        self._owner = False
        self._closing.close()

    def _join(self, address: str | None) -> None:
        import ray

        if ray.is_initialized():
            self._owner = False
            self._refuse_other_cluster(address)
            return
        if address is None:
            raise UsageError(
                "no Ray cluster found: start one with `ray start --head`, or name one with --address or RAY_ADDRESS"
            )
        if "://" in address:
            raise UsageError(
                f"{address} is an address of Ray's dashboard or of Ray Client; raycontrol runs on a node of the "
                "cluster and wants its GCS address (`host:6379`); or unset RAY_ADDRESS and give no --address there"
            )
        trouble = _trouble(address)
        if trouble is not None:
            raise ClusterUnreachable(address, trouble)
        rayauth.check(address)
        # A driver of `ray job submit` hands its runtime_env to every actor it creates, detached ones too. The
        # controller must not live in the working directory of the first job that was ever submitted.
        os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
        self._init(address=address)

    def _start_ray(self) -> None:
        with ExitStack() as stack:
            temp = tempfile.mkdtemp(prefix="rc-")  # short: socket paths end at 107 bytes
            stack.callback(shutil.rmtree, temp, ignore_errors=True)
            secret = secrets.token_hex(32)
            # The tables of a cluster, if this shell has the settings of its head (`raycontrol ray-env`), are not for this Ray.
            own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret, raysettings.STORAGE: "memory"}
            stack.enter_context(environment(own))
            with _groups_of_their_own():
                self._init(address="local", include_dashboard=False, _temp_dir=temp)
            self._closing = stack.pop_all()

    def _init(self, **options: Any) -> None:
        import ray

        from raycontrol.actors import NAMESPACE

        with _own_signals():
            try:
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
            except (ConnectionError, RuntimeError, OSError) as error:
                raise ClusterUnreachable(
                    str(options["address"]), f"{type(error).__name__}: {error}"
                ) from error

    def _gcs_address(self) -> str:
        from raycontrol.cluster import cluster_address

        return cluster_address()

    def _refuse_other_cluster(self, address: str | None) -> None:
        current = self._gcs_address()
        if address is not None and address != current:
            raise UsageError(
                f"this process is connected to the Ray cluster at {current} already, not to {address}"
            )


def head_fault(cause: Exception) -> HeadFault:
    """Return the error for one that was raised on the head and that nobody foresaw."""
    return HeadFault(f"{type(cause).__name__}: {cause}")


STARTER = """
import sys
from raycontrol.connect import Session
from raycontrol.errors import RaycontrolError
from raycontrol.settings import Settings
try:
    Session(Settings.load(), sys.argv[1], embedded=False).controller()
except RaycontrolError as error:
    sys.exit(str(error))
"""


def start_elsewhere(address: str, settings: Settings) -> None:
    """Start the controller of the cluster at ``address`` from another process; raises ControllerUnavailable."""
    command = [sys.executable, "-c", STARTER, address]
    options: dict[str, Any] = {"cwd": "/", "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        ended = subprocess.run(
            command, env={**os.environ, **settings.variables()}, timeout=2 * START_S, **options
        )
    except subprocess.TimeoutExpired:
        raise ControllerUnavailable(f"it could not be started within {2 * START_S:g} s") from None
    if ended.returncode:
        raise ControllerUnavailable(f"it could not be started: {ended.stderr.strip()[-2000:]}")


def wait_for_another(former: int | None, ask: Callable[[], int | None], timeout_s: float) -> None:
    """Return when ``ask`` no longer names the ``former`` process; raises ControllerUnavailable."""
    deadline = time.monotonic() + timeout_s
    while former is not None and ask() == former:
        if time.monotonic() > deadline:
            raise ControllerUnavailable(
                f"the controller's process {former} did not end; kill it on the head, and Ray starts another"
            )
        time.sleep(RESTART_POLL_S)


def _noted(note: Path) -> str | None:
    """Return the address that `ray start` left on this machine; None unless this user or root did."""
    try:
        descriptor = os.open(note, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid())
        return os.read(descriptor, 1024).decode(errors="replace").strip() or None if is_ours else None
    finally:
        os.close(descriptor)


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and put back at the end what was there."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the program's SIGTERM handler, which ``ray.init`` would replace by one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Have Ray's processes lead process groups of their own.

    What is sent to our group, as `timeout` does, must let the job end while Ray is there. Ray starts its processes
    with a ``preexec_fn``, and then Python calls such hooks in the child.
    """
    within = True

    def lead() -> None:
        if within:
            os.setpgrp()

    os.register_at_fork(after_in_child=lead)
    try:
        yield
    finally:
        within = False


def _trouble(address: str) -> str | None:
    """Return why no GCS can be there, or None. `ray.init` itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TCP_TRY_S) as connection:
            return _not_grpc(connection)
    except (OSError, ValueError) as error:
        return str(error)


def _not_grpc(connection: socket.socket) -> str | None:
    """Return why what listens there is no gRPC server, or None; one that wants TLS says nothing or sends an alert."""
    connection.settimeout(GREETING_S)
    connection.sendall(HTTP2_HELLO)
    try:
        answer = connection.recv(64)
    except TimeoutError:
        return "something listens there but does not answer"
    except ConnectionResetError:
        return None
    is_settings_frame, is_tls = answer[3:4] == b"\x04", answer[:1] == b"\x15"
    if not answer or is_settings_frame or is_tls:
        return None
    return "what listens there is not Ray's GCS, whose port is 6379 unless `ray start --port` chose another"
