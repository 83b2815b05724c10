"""Ray, as a client sees it: finding a cluster, joining it as a driver, starting one for a single run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raycontrol.errors import ClusterUnreachable, ControllerUnavailable, RaycontrolError, UsageError
from raycontrol.jobrows import EMBEDDED
from raycontrol.placement import NoRoom, place
from raycontrol.settings import Settings
from raycontrol.spec import JobSpec, members

log = logging.getLogger(__name__)

TCP_TRY_S = 3.0
GREETING_S = 10.0
CALL_S = 60.0
START_S = 60.0
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""What every client of a gRPC server says first: the preface of HTTP/2 and an empty SETTINGS frame (RFC 9113, 3.4)."""


def find_address(settings: Settings, explicit: str | None = None) -> str | None:
    """Return the address of the cluster to use, or None when there is none.

    In this order: ``explicit``, RAY_ADDRESS, the cluster that was started on this machine, if it answers. Never
    "any Ray that can be found": that may be the nested one of a job.
    """
    chosen = explicit or settings.address
    if chosen and chosen not in ("auto", "local"):
        return chosen
    note = Path(settings.ray_tmpdir) / "ray" / "ray_current_cluster"  # written by `ray start`
    if chosen == "local" or not note.exists():
        return None
    address = note.read_text().strip()
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
        self._temp: str | None = None
        self._owner = True
        if embedded:
            self._start_ray()
            self.cluster_name = f"{EMBEDDED}{secrets.token_hex(6)}"
        else:
            self._join(address)
            self.cluster_name = settings.cluster or self._gcs_address()

    def controller(self) -> Any:
        """Return the cluster's controller, started if there is none, once versions have been compared.

        Raises VersionMismatch, StoreError, ControllerUnavailable.
        """
        from raycontrol.cluster import controller_handle
        from raycontrol.version import __version__

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

    def refuse_what_never_fits(self, spec: JobSpec) -> None:
        """Raise UsageError for a job that an embedded cluster could never run: no node will join it."""
        from raycontrol.cluster import living_nodes

        room = place(members(spec), spec.placement, living_nodes()) if self.embedded else None
        if isinstance(room, NoRoom) and room.never:
            raise UsageError(f"the Ray of this run is this machine alone: {room.why}")

    def archive(self) -> Any:
        """Return the archive, which the controller has started."""
        from raycontrol.actors import archive_handle

        return archive_handle()

    def restart_controller(self) -> Any:
        """End the controller's process; Ray starts it again, with the code that is installed now. Jobs run on."""
        import ray

        from raycontrol.cluster import existing_controller

        handle = existing_controller()
        if handle is not None:
            ray.kill(handle, no_restart=False)
        return self.controller()

    def get(self, reference: Any, timeout_s: float = CALL_S) -> Any:
        """Return the result of a call, or raise its error as it was raised on the other side."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RaycontrolError):
                raise error.cause from None
            raise ControllerUnavailable(f"a call to the head failed: {error}") from error
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
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)

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
                "cluster and wants its GCS address (`host:6379`), or none"
            )
        trouble = _trouble(address)
        if trouble is not None:
            raise ClusterUnreachable(address, trouble)
        # A driver of `ray job submit` hands its runtime_env to every actor it creates, detached ones too. The
        # controller must not live in the working directory of the first job that was ever submitted.
        os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
        self._init(address=address)

    def _start_ray(self) -> None:
        self._temp = tempfile.mkdtemp(prefix="rc-")  # short: socket paths end at 107 bytes
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        try:
            with _groups_of_their_own():
                self._init(address="local", include_dashboard=False, _temp_dir=self._temp)
        except BaseException:
            shutil.rmtree(self._temp, ignore_errors=True)
            raise

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
