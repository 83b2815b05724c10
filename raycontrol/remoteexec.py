"""A command across nodes as the HTTP server tells of it: an event stream with whose connection it ends."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import httpx

from raycontrol.errors import ControllerUnavailable
from raycontrol.execution import NO_ANSWER, STOPPED, Began, Command, News, Over, Target, Wrote
from raycontrol.httpcalls import Call, HttpCalls, about, as_json, given
from raycontrol.spread import INTERRUPTED

SILENT_S = 60.0
"""The server says something every 15 seconds."""
LOST = "the connection to the server was lost; what it ran is ended there"


def exec_call(target: Target, command: Command, parallel: int | None) -> Call:
    script = None if command.script is None else base64.b64encode(command.script).decode()
    words = command.words if isinstance(command.words, str) else list(command.words)
    common = given(command=words, script=script, timeout_s=command.timeout_s, parallel=parallel)
    if target.job is not None:
        of_job = given(**common, instances=list(target.instances), group=target.group)
        return about(target.job, "POST", "/exec", body=as_json(of_job))
    of_nodes = {
        "nodes": list(target.nodes),
        "all": target.all,
        "plain": command.plain,
        "root": command.root,
        "absent_too": target.absent_too,
    }
    return Call("POST", "/exec", body=as_json({**common, **of_nodes, **given(group=target.group)}))


class HttpExecution:
    """``readers.Execution`` over HTTP. A stop closes the connection: the server ends the command, and tells no more of it."""

    def __init__(self, calls: HttpCalls, call: Call) -> None:
        self._streaming: AbstractContextManager[httpx.Response] = calls.stream(call, SILENT_S)
        self._answer = self._streaming.__enter__()
        self._stopped = False
        try:
            self._events = self._answer_events()
            kind, document = next(self._events, ("", {}))
            if kind != "places":
                raise ControllerUnavailable(f"what {calls.url} answers is no news of a command")
        except BaseException:
            self._streaming.__exit__(None, None, None)
            raise
        self.places: tuple[str, ...] = tuple(document["places"])
        self._left = dict.fromkeys(self.places)

    def __enter__(self) -> HttpExecution:
        return self

    def __exit__(self, *_: object) -> None:
        self._streaming.__exit__(None, None, None)

    def __iter__(self) -> Iterator[News]:
        with suppress(httpx.RequestError, httpx.StreamError):
            for kind, document in self._events:
                news = _news(kind, document)
                if isinstance(news, Over):
                    self._left.pop(news.place, None)
                if news is not None:
                    yield news
        for place in [*self._left]:
            del self._left[place]
            yield Over(place, STOPPED, why=INTERRUPTED) if self._stopped else Over(place, NO_ANSWER, why=LOST)

    def stop(self) -> None:
        self._stopped = True
        stream = self._answer.extensions.get("network_stream")
        connection = None if stream is None else stream.get_extra_info("socket")
        if isinstance(connection, socket.socket):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # whoever waits for the next event sees the end

    def _answer_events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = ""
        for line in self._answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


def _news(kind: str, document: dict[str, Any]) -> News | None:
    """Return what an event tells; None for kinds that this version does not know."""
    match kind:
        case "began":
            return Began(document["place"], document["user"], document.get("remark"))
        case "output":
            return Wrote(document["place"], base64.b64decode(document["data"]))
        case "over":
            rest = (document.get(name) for name in ("code", "signal", "why"))
            return Over(document["place"], document["status"], *rest)
    return None
