"""Runs the application with uvicorn."""

from __future__ import annotations

import gc
import logging
import resource
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from raycontrol.api.app import Config, make_app
from raycontrol.api.protocol import PatientProtocol, check_uvicorn
from raycontrol.errors import UsageError
from raycontrol.httpcalls import is_loopback
from raycontrol.readers import ServerDoor

log = logging.getLogger(__name__)

GRACE_S = 3
"""Streams never end by themselves; those who follow come back to the next server."""


@dataclass(frozen=True)
class Listen:
    """Where the server listens, and with which certificate."""

    host: str
    port: int
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure_http: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together")
        if self.tls_cert is None and not self.insecure_http and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} is open to other machines, and without TLS whoever listens on the way reads tokens "
                "and secrets: give --tls-cert and --tls-key, keep 127.0.0.1 and use an ssh tunnel, or accept it "
                "with --insecure-http"
            )

    def check_certificate(self) -> None:
        """Raise UsageError, naming the file, where certificate and key cannot be used."""
        for option, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            try:
                if path is not None:
                    Path(path).open("rb").close()
            except OSError as error:
                raise UsageError(f"{option}: {path}: cannot be read: {error.strerror}") from None
        if self.tls_cert is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"--tls-cert, --tls-key: {self.tls_cert} and {self.tls_key} are no certificate in PEM and its private key "
                f"without a passphrase ({getattr(error, 'reason', None) or error})"
            ) from None

    @property
    def url(self) -> str:
        scheme = "http" if self.tls_cert is None else "https"
        address = self.host.strip("[]")
        host = f"[{address}]" if ":" in address else address
        return f"{scheme}://{host}:{self.port}"


def serve(
    open_door: Callable[[], ServerDoor], config: Config, listen: Listen, ready: Callable[[str], None]
) -> None:
    """Serve until a signal ends it; ``ready`` is called with the URL once it listens. Raises UsageError when it cannot."""
    check_uvicorn()
    _allow_many_files()
    try:
        server = make_server(open_door, config, listen, ready)
        _settle()
        server.run()
    except OSError as error:
        raise UsageError(f"cannot serve at {listen.url}: {error}") from None
    except SystemExit:
        raise UsageError(f"cannot serve at {listen.url}: the reason is above") from None


def _allow_many_files() -> None:
    """Every connection is a file; how many a process has at first is often fewer than it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _settle() -> None:
    """Spare the collector what was loaded until now: to walk it all takes a tenth of a second, in which nobody is answered."""
    gc.collect()
    gc.freeze()


def make_server(
    open_door: Callable[[], ServerDoor], config: Config, listen: Listen, ready: Callable[[str], None]
) -> uvicorn.Server:
    """Return what ``serve`` runs."""
    return _Server(uvicorn.Config(make_app(open_door, config), **_options(config, listen)), listen, ready)


class _Server(uvicorn.Server):
    """Says when it listens, and where (port 0 is any free one), and when it has ended."""

    def __init__(self, config: uvicorn.Config, listen: Listen, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._listen = listen
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._ready(replace(self._listen, port=port).url)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        log.info("the server has ended; jobs run on")  # the signal that ended it is raised again after this


def _options(config: Config, listen: Listen) -> dict[str, Any]:
    limits = config.limits
    return {
        "host": listen.host.strip("[]"),
        "port": listen.port,
        "http": partial(PatientProtocol, request_s=limits.request_s, write_s=limits.write_s),
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "on",
        "ssl_certfile": listen.tls_cert,
        "ssl_keyfile": listen.tls_key,
        "log_config": None,
        "access_log": False,  # ours has the request's id, and no query
        "server_header": False,
        "proxy_headers": False,  # whoever is on this machine could write any address into the audit
        "timeout_keep_alive": 10,
        "timeout_graceful_shutdown": GRACE_S,
        "h11_max_incomplete_event_size": 64 * 1024,
    }
