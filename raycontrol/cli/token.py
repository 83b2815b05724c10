"""``token create``, ``token list``, ``token revoke``: who may use the HTTP interface."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.access import TOKEN_TTL_S
from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.access import Role, TokenInfo

DAY_S = 86_400.0
COLUMNS = ("NAME", "ROLE", "USER", "CREATED", "EXPIRES", "STATE")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The token's name.", show_default=False)]


def create(
    context: typer.Context,
    name: Name,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="viewer (reads all jobs), user (own jobs), operator (all jobs) or admin (also tokens and the audit).",
            show_default=False,
        ),
    ],
    user: Annotated[
        str | None,
        typer.Option(
            metavar="USER", help="The user it stands for.  [default: your login name]", show_default=False
        ),
    ] = None,
    days: Annotated[
        float,
        typer.Option(
            metavar="N",
            callback=options.at_least(0),
            help="How long it lives; 0: until it is revoked.",
        ),
    ] = round(TOKEN_TTL_S / DAY_S),
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write it to a new file that only you can read, instead of stdout.",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Make a token for the HTTP interface (`raycontrol serve`) and print it, this once.

    It is kept as a hash: whoever loses it needs a new one. Starts the cluster's controller if it has none.

    \b
    Examples:
      raycontrol token create laptop --role user --output ~/.raycontrol-token
      raycontrol token create dashboard --role viewer --days 0
    """
    services: Services = context.obj
    known = _role(role)
    ttl_s = days * DAY_S if days else None
    with _new_file(output) as keep, services.client(address) as client:
        info, text = client.create_token(name, known, user=user, ttl_s=ttl_s)
        if keep is not None:
            keep(text)
    _print_new(services, info, text if output is None else None, as_json)
    where = "is shown only now" if output is None else f"is in {output} and shown nowhere"
    services.out.note(f"token {info.name} {where}; keep it like a password")


def list_tokens(
    context: typer.Context, address: options.Address = None, as_json: options.Json = False
) -> None:
    """List the tokens of the HTTP interface, the expired and revoked ones too; what they are is never shown again.

    \b
    Example:
      raycontrol token list
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.tokens()
    if as_json:
        services.out.json([info.model_dump(mode="json") for info in found])
    else:
        now = time.time()
        services.out.table(COLUMNS, [_row(info, now) for info in found])


def revoke(
    context: typer.Context, name: Name, address: options.Address = None, as_json: options.Json = False
) -> None:
    """End a token, for good. A server may go on taking it for two seconds.

    \b
    Example:
      raycontrol token revoke laptop
    """
    services: Services = context.obj
    with services.client(address) as client:
        info = client.revoke_token(name)
    if as_json:
        services.out.json(info.model_dump(mode="json"))
    else:
        services.out.line(f"{info.name} revoked")


def _role(word: str) -> Role:
    from raycontrol.access import Role

    if word not in [role.value for role in Role]:
        raise UsageError(f"--role: must be one of {', '.join(Role)}, got {word}")
    return Role(word)


@contextmanager
def _new_file(path: Path | None) -> Iterator[Callable[[str], None] | None]:
    """Give what writes to a new file that only its owner can read; made first, for a token that cannot be written is lost.

    Without a path there is none. Raises UsageError; a file that was made for nothing is removed.
    """
    if path is None:
        yield None
        return
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise UsageError(f"--output: {path}: {error.strerror}") from None
    with open(handle, "w", encoding="ascii") as file:
        try:
            yield lambda text: print(text, file=file, flush=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _print_new(services: Services, info: TokenInfo, text: str | None, as_json: bool) -> None:
    """Print a new token; in JSON with what is known of it, and without its text where that is in a file."""
    if as_json:
        shown = {} if text is None else {"text": text}
        services.out.json({**info.model_dump(mode="json"), **shown})
    elif text is not None:
        services.out.line(text)


def _row(info: TokenInfo, now: float) -> tuple[str, ...]:
    from raycontrol.cli.render import ago, moment

    expires = "never" if info.expires_at is None else moment(info.expires_at)
    return (info.name, info.role, info.user, ago(info.created_at, now), expires, _state(info, now))


def _state(info: TokenInfo, now: float) -> str:
    if info.revoked_at is not None:
        return "revoked"
    return "valid" if info.expires_at is None or now < info.expires_at else "expired"
