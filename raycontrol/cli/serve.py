"""``serve``: the HTTP interface of the cluster, on its head."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycontrol import extras, tokens
from raycontrol.access import Role
from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.disk import replace_file
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.connect import Session
    from raycontrol.readers import ServerDoor
    from raycontrol.settings import Settings
    from raycontrol.store import Store

TOKEN_NAME = "serve"
TOKEN_FILE = "serve.token"


def checked_port(value: int) -> int:
    if not 0 <= value <= 65535:
        raise typer.BadParameter(f"must be from 0 to 65535, got {value}")
    return value


Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every address of this machine.")
]
Port = Annotated[int, typer.Option(metavar="N", callback=checked_port, help="The port; 0 is any free one.")]
TlsCert = Annotated[
    str | None,
    typer.Option("--tls-cert", metavar="FILE", help="The certificate's chain, PEM.", show_default=False),
]
TlsKey = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.", show_default=False)
]
InsecureHttp = Annotated[
    bool,
    typer.Option("--insecure-http", help="Listen without TLS where others can read tokens on their way."),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="A name by which clients ask for this server, as a proxy's. May be repeated.",
        show_default=False,
    ),
]


def serve(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8642,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure_http: InsecureHttp = False,
    allowed_host: AllowedHost = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Serve the cluster over HTTP, until it is told to end. Runs on the head; jobs do not depend on it.

    Every request needs a token. Where there is none yet, one of an admin is made and written to
    RAYCONTROL_HOME/serve.token; `raycontrol token create` makes others.

    \b
    Examples:
      raycontrol serve
      raycontrol serve --host 0.0.0.0 --tls-cert head.pem --tls-key head.key
    """
    extras.require("ray", "fastapi", "uvicorn", "sqlalchemy")
    from raycontrol.api.app import Config
    from raycontrol.api.server import Listen
    from raycontrol.api.server import serve as run
    from raycontrol.settings import Settings

    services: Services = context.obj
    listen = Listen(host, port, tls_cert, tls_key, insecure_http)
    listen.check_certificate()
    settings = Settings.load()
    sys.stdout = sys.stderr  # what Ray prints is no result; ``Output`` has taken the stream before
    _log_to_stderr()
    with connected(settings, address) as head:
        if (doubt := exposure(head.ray_address, head.ray_auth_mode)) is not None:
            services.out.note(f"warning: {doubt}")
        token = token_place(head.open_door(), settings)
        config = Config(
            home=settings.home_path,
            host=host,
            allowed_hosts=tuple(allowed_host or ()),
            package_cap_bytes=settings.package_cap_bytes,
        )
        run(head.open_door, config, listen, lambda url: _tell(services, url, token, as_json))


@dataclass(frozen=True)
class Head:
    """A connection to the cluster from its head."""

    session: Session
    ray_address: str
    ray_auth_mode: str
    """As its `ray start` has it, whatever is set in this shell."""
    store: Store

    def open_door(self) -> ServerDoor:
        """Return the way to the controller that the cluster has now; one is started if there is none."""
        from raycontrol.storereader import HeadDoor

        return HeadDoor(self.session, self.session.controller(), self.store)


@contextmanager
def connected(settings: Settings, address: str | None) -> Iterator[Head]:
    """Give a connection to the cluster; raises UsageError where its files do not lie."""
    from raycontrol.connect import Session, find_address
    from raycontrol.store import Store

    session = Session(settings, find_address(settings, address), embedded=False)
    try:
        facts: dict[str, Any] = session.get(session.controller().describe.remote())
        refuse_elsewhere(facts, socket.gethostname(), settings.home_path)
        with Store(settings.home_path, create=False) as store:
            yield Head(session, str(facts["ray"]), str(facts.get("ray_auth_mode")), store)
    finally:
        session.close()


def refuse_elsewhere(facts: Mapping[str, Any], hostname: str, home: Path) -> None:
    """Logs are read from the controller's home: another machine's, or another folder, would have none."""
    if facts["host"] != hostname:
        raise UsageError(f"serve runs where the cluster's controller does: on {facts['host']}")
    if Path(facts["home"]).resolve() != home.resolve():
        raise UsageError(
            f"the cluster's controller keeps its jobs in {facts['home']}: set RAYCONTROL_HOME to it"
        )


def exposure(ray_address: str, ray_auth_mode: str) -> str | None:
    """Return what is to be said where others can reach the cluster past this server; None where they cannot."""
    from raycontrol.api.hosts import host_name
    from raycontrol.httpcalls import is_loopback

    name = host_name(ray_address) or ray_address
    if is_loopback(name) or ray_auth_mode == "token":
        return None
    return (
        f"the Ray cluster itself listens at {ray_address} without authentication: whoever reaches that port can run "
        "programs on its nodes, with no token of raycontrol's. Start Ray with RAY_AUTH_MODE=token, or keep others from "
        "its ports (SECURITY.md)"
    )


def token_place(door: ServerDoor, settings: Settings) -> str:
    """Return where a token is to be found; where there are none, one of an admin is made. Its text is never printed."""
    path = settings.home_path / TOKEN_FILE
    known = door.tokens()
    if not known and (text := _first_token(door, settings)) is not None:
        replace_file(path, f"{text}\n".encode(), 0o600)  # nobody else can read it, not even for a moment
        return f"{path} (an admin's, made now)"
    if _is_good(door, path):
        return f"{path} (an admin's)"
    make_one = "make one with `raycontrol token create NAME --role ROLE`"
    if any(info.name == TOKEN_NAME and info.revoked_at is None for info in known):
        ends = f"end it with `raycontrol token revoke {TOKEN_NAME}`"
        return f"{make_one}; `{TOKEN_NAME}`, an admin's, is in force and not in {path} any more: {ends}"
    return make_one


def _first_token(door: ServerDoor, settings: Settings) -> str | None:
    """Return a new admin's token; None when another server has just made one."""
    try:
        return door.create_token(TOKEN_NAME, Role.ADMIN, settings.user, None, settings.user)[1]
    except UsageError:
        if not door.tokens():
            raise
        return None


def _log_to_stderr() -> None:
    """One line a request, and what goes wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("raycontrol", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)


def _is_good(door: ServerDoor, path: Path) -> bool:
    try:
        parts = tokens.parsed(path.read_text(encoding="ascii", errors="replace").strip())
    except OSError:
        return False
    return parts is not None and door.authenticate(parts.id, parts.digest) is not None


def _tell(services: Services, url: str, token: str, as_json: bool) -> None:
    if as_json:
        services.out.json({"url": url, "docs": f"{url}/docs", "token": token}, flush=True)
        return
    services.out.line(f"raycontrol serves {url} (what can be asked: {url}/docs)")
    services.out.line(f"token: {token}", flush=True)
