"""The ``raycontrol`` command.

``--help``, ``version``, ``plan``, ``schema``, ``env`` and ``ray-env`` answer without importing Ray; each command imports what
it needs when it runs.

Exit status: 0; 2 for a wrong call or spec; 125 when raycontrol or the infrastructure failed; for ``run`` and
``wait`` the job's own (see ``JobInfo.exit_status``); 141 when nobody read the output any more (128 + SIGPIPE).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from raycontrol.cli.output import Output, OutputClosed
from raycontrol.cli.services import FOLLOWING, Services
from raycontrol.errors import RaycontrolError

__all__ = ["invoke", "main"]

BROKEN = 125
PIPE_CLOSED = 128 + signal.SIGPIPE
COMMANDS_WITH_WORDS = frozenset({"exec", "run", "submit", "plan"})


def main(arguments: Sequence[str] | None = None, services: Services | None = None) -> NoReturn:
    """The console script: run the command of ``sys.argv`` and end this process with its status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends quietly; `run` has handlers of its own
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a log line must never fail to print in a C locale
    status = invoke(sys.argv[1:] if arguments is None else arguments, services)
    if any(thread.name.startswith(FOLLOWING) for thread in threading.enumerate()):
        # Left in the middle: a thread that waits inside Ray would abort the interpreter's own end.
        os._exit(status)
    sys.exit(status)


def invoke(arguments: Sequence[str], services: Services | None = None) -> int:
    """Run one command line and return its exit status; a RaycontrolError becomes one message on stderr."""
    services = services or Services(Output())
    try:
        status = _dispatch(list(arguments), services)
        services.out.flush()
        return status
    except OutputClosed as closed:
        if not str(closed):
            return PIPE_CLOSED
        services.out.note(f"raycontrol: {closed}")
        return BROKEN
    except RaycontrolError as error:
        services.out.note(f"raycontrol: {error}")
        return error.exit_status
    except Exception:
        import traceback

        services.out.note(f"{traceback.format_exc()}raycontrol: this should not happen; please report it")
        return BROKEN
    finally:
        with contextlib.suppress(OutputClosed):
            services.out.flush()


def _dispatch(arguments: list[str], services: Services) -> int:
    from raycontrol.cli.app import app

    arguments, services.words = split_words(arguments)
    try:
        app(arguments, prog_name="raycontrol", obj=services)
    except SystemExit as end:  # how typer returns: commands raise typer.Exit(status), usage errors are 2
        return end.code if isinstance(end.code, int) else 0
    return 0


def split_words(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Take the command (what follows the first ``--``) from the arguments of commands that have one."""
    if not arguments or arguments[0] not in COMMANDS_WITH_WORDS or "--" not in arguments:
        return arguments, ()
    at = arguments.index("--")
    return arguments[:at], tuple(arguments[at + 1 :])
