"""One request to a raycontrol server and its answer: repeated while the server is away, refusals become our own errors.

The token goes into one header of each request and nowhere else.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from raycontrol.errors import (
    ControllerUnavailable,
    Fault,
    Forbidden,
    HeadFault,
    JobNotFound,
    PackageError,
    PlanError,
    RaycontrolError,
    ServerNotTrusted,
    ServerUnreachable,
    SpecError,
    StoreError,
    StoreRefused,
    Unauthorized,
    UsageError,
)
from raycontrol.settings import checked_token, checked_url, process_environment
from raycontrol.version import __version__

log = logging.getLogger(__name__)

ROOT = "/api/v1"
VERSION_HEADER = "X-Raycontrol-Version"
CONNECT_S = 10.0
ANSWER_S = 60.0
LARGEST_ANSWER_BYTES = 256 << 20
"""Unpacked: a few bytes of a compressed answer may stand for gigabytes. The largest pages are far below."""

PATIENCE_S = 60.0
"""How long after its first failure a call is repeated."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
TOLD_AT_TRY = 3
TRY_AGAIN = frozenset({429, 502, 503, 504})
OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})
NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
NEVER_PASSES = frozenset({NOT_TRUSTED, "WRONG_VERSION_NUMBER"})
"""OpenSSL's reasons for which a call that is repeated fails again."""

PLAIN_HTTP = (
    "plain http to {host} would show the token and all else to whoever listens; use https, or an ssh tunnel and "
    "http://127.0.0.1, or set RAYCONTROL_INSECURE_HTTP=1 where that does not matter"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One request, which may be made again. ``job_id`` is the job that it is about; ``wait_s`` is how long the server may take
    before it has something to say; ``tells`` are statuses that are no refusal here.
    """

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    content_type: str = "application/json"
    job_id: str | None = None
    wait_s: float = 0.0
    tells: frozenset[int] = frozenset()

    def headers(self) -> dict[str, str]:
        return {"Content-Type": self.content_type} if self.body else {}


def about(job_id: str, method: str, path: str = "", **fields: Any) -> Call:
    return Call(method, f"/jobs/{segment(job_id)}{path}", job_id=job_id, **fields)


def segment(text: str) -> str:
    """Return ``text`` as one part of a path, whatever is in it: dots too, which alone would mean another folder."""
    return quote(text, safe="").replace(".", "%2E")


def given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def as_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


class HttpCalls:
    """The way to one server. Raises UsageError for a URL or token that cannot be one, and for plain http to another machine.

    May be used by several threads.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        insecure_http: bool,
        transport: httpx.BaseTransport | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        largest_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self.url = checked("url", checked_url, url)
        refuse_plain_http(self.url, insecure_http)
        headers = {"User-Agent": f"raycontrol/{__version__}", VERSION_HEADER: __version__}
        if token is not None:
            headers["Authorization"] = f"Bearer {checked('token', checked_token, token)}"
        self._http = open_http(self.url, headers, transport)
        self._clock = clock
        self._sleep = sleep
        self._largest_bytes = largest_bytes

    def close(self) -> None:
        self._http.close()

    def read(self, kind: TypeAdapter[T], call: Call) -> T:
        """Return what the server answers, as ``kind``; raises what it refuses with."""
        return self.decoded(kind, self.ask(call))

    def ask(self, call: Call) -> httpx.Response:
        """Return the answer of a server that does as it is asked; raises what it refuses with."""
        answer = self._answer(call)
        if answer.is_redirect:
            raise ControllerUnavailable(
                f"{self.url} answers with a redirect, which is not followed; give the URL of the server itself"
            )
        if not answer.is_success and answer.status_code not in call.tells:
            raise refusal(self.url, call, answer)
        return answer

    @contextmanager
    def stream(self, call: Call, silent_s: float = ANSWER_S) -> Iterator[httpx.Response]:
        """Give the answer while it comes, which is asked for once; raises what the server refuses with, and ServerUnreachable.

        The server sends something at least every ``silent_s`` seconds.
        """
        limits = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=max(ANSWER_S, silent_s))
        options: dict[str, Any] = {"params": call.params, "content": call.body, "headers": call.headers()}
        with ExitStack() as held:
            try:
                answer = held.enter_context(
                    self._http.stream(call.method, call.path, timeout=limits, **options)
                )
                if not answer.is_success:
                    raise refusal(self.url, call, self._whole(answer))
            except httpx.RequestError as error:
                raise unreachable(error)(self.url, trouble_of(error, self.url)) from None
            yield answer

    @contextmanager
    def download(self, call: Call) -> Iterator[IO[bytes]]:
        """Give the body of an answer, of any length, to be read once; raises as ``stream``, also when it ends too early."""
        with self.stream(call) as answer:
            try:
                yield BufferedReader(_Body(answer.iter_bytes()))
            except httpx.RequestError as error:
                raise unreachable(error)(self.url, trouble_of(error, self.url)) from None

    def decoded(self, kind: TypeAdapter[T], answer: httpx.Response) -> T:
        """Return an answer's JSON as ``kind``; raises ControllerUnavailable when it is something else."""
        try:
            return kind.validate_json(answer.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise ControllerUnavailable(
                f"what {self.url} answers cannot be read ({where}: {first['msg']}){versions_of(answer)}"
            ) from None

    def _answer(self, call: Call) -> httpx.Response:
        """Return the answer, whatever its status; raises ServerUnreachable when none has come for too long."""
        pauses = Pauses(self._clock, self._sleep)
        while True:
            try:
                answer = self._try(call)
            except httpx.RequestError as error:
                trouble = trouble_of(error, self.url)
                if never_passes(error) or not pauses.take(f"{self.url}: {trouble}"):
                    raise unreachable(error)(self.url, trouble) from None
                continue
            if answer.status_code not in TRY_AGAIN:
                return answer
            trouble = f"{self.url} answers {answer.status_code} {answer.reason_phrase}"
            if not pauses.take(trouble, retry_after_s(answer)):
                return answer

    def _try(self, call: Call) -> httpx.Response:
        with self._http.stream(
            call.method,
            call.path,
            params=call.params,
            content=call.body,
            headers=call.headers(),
            timeout=httpx.Timeout(ANSWER_S + call.wait_s, connect=CONNECT_S),
        ) as answer:
            return self._whole(answer)

    def _whole(self, answer: httpx.Response) -> httpx.Response:
        """Return the answer with its body; raises ControllerUnavailable when that is larger than any of raycontrol's."""
        body = bytearray()
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > self._largest_bytes:
                raise ControllerUnavailable(
                    f"{self.url} answers with more than {self._largest_bytes >> 20} MiB, which raycontrol never does; is it "
                    "the URL of `raycontrol serve`?"
                )
        kept = {name: value for name, value in answer.headers.items() if name not in OF_THE_TRANSFER}
        return httpx.Response(answer.status_code, headers=kept, content=bytes(body), request=answer.request)


class _Body(RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def checked(what: str, check: Callable[[object], str], value: str) -> str:
    """Return ``value`` as ``check`` has it; raises UsageError, which does not tell the value."""
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from None


def refuse_plain_http(url: str, insecure_http: bool) -> None:
    host = urlsplit(url).hostname or ""
    if urlsplit(url).scheme == "http" and not insecure_http and not is_loopback(host):
        raise UsageError(PLAIN_HTTP.format(host=host))


def is_loopback(host: str) -> bool:
    """Whether nobody but programs of that machine itself can reach, or listen to, what goes to ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def open_http(url: str, headers: Mapping[str, str], transport: httpx.BaseTransport | None) -> httpx.Client:
    """Trust who the system trusts, or SSL_CERT_FILE names; raises UsageError when that cannot be read. Plain http goes to its host itself, never to a proxy."""
    encrypted = urlsplit(url).scheme == "https"
    return httpx.Client(
        base_url=url + ROOT,
        headers=headers,
        transport=transport,
        verify=trusting() if encrypted and transport is None else False,
        trust_env=encrypted,
        follow_redirects=False,
    )


def trusting() -> ssl.SSLContext:
    """OpenSSL itself passes over a file that it cannot read, and then trusts nobody."""
    context = ssl.create_default_context()
    if path := process_environment().get("SSL_CERT_FILE"):
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            raise UsageError(f"SSL_CERT_FILE: {path}: holds no certificates in PEM") from None
        except OSError as error:
            raise UsageError(f"SSL_CERT_FILE: {path}: cannot be read: {error.strerror}") from None
    return context


class Pauses:
    """The growing pauses between the tries of one call, until ``PATIENCE_S`` after the first one failed."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._deadline: float | None = None
        self._tries = 0

    def take(self, trouble: str, least_s: float = 0.0) -> bool:
        """Pause, at least for what the server asks for; False, at once, when that would take too long."""
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + PATIENCE_S
        self._tries += 1
        pause_s = max(least_s, min(FIRST_PAUSE_S * 2 ** (self._tries - 1), LONGEST_PAUSE_S))
        if now + pause_s > self._deadline:
            return False
        if self._tries == TOLD_AT_TRY:
            log.warning("%s; trying again for up to %g s", trouble, PATIENCE_S)
        self._sleep(pause_s)
        return True


# -- answers ---------------------------------------------------------------------------------------------------------


class Problem(BaseModel):
    """Why a request was refused, as RFC 9457 writes it; the last part of ``type`` is the name of an error."""

    type: str = ""
    title: str = ""
    detail: str = ""
    faults: tuple[Fault, ...] = ()


ERRORS: Mapping[str, type[RaycontrolError]] = {
    "internal-error": HeadFault,
    "package-error": PackageError,
    "plan-error": PlanError,
    "store-error": StoreError,
    "store-refused": StoreRefused,
    "usage-error": UsageError,
}
NO_SUCH_JOB = frozenset({"not-there", "job-not-found"})
"""Kinds of a 404 that the server has for a job. Another server, or an older one, may have no such route."""

BY_STATUS: Mapping[int, type[RaycontrolError]] = {
    400: UsageError,
    403: Forbidden,
    404: UsageError,
    408: UsageError,
    409: UsageError,
    413: UsageError,
    415: UsageError,
    416: UsageError,
    421: UsageError,
    422: UsageError,
    429: UsageError,
}
"""For errors that only the server has, and for answers of a proxy before it. Others are the cluster's fault."""

PROBLEM = TypeAdapter(Problem)


def refusal(url: str, call: Call, answer: httpx.Response) -> RaycontrolError:
    """Return the error that the server tells of, of the class that it has over Ray too."""
    status, problem = answer.status_code, problem_of(answer)
    kind = problem.type.rpartition(":")[2]
    text = problem.detail or problem.title or f"{url} answers {status} {answer.reason_phrase}"
    if status == 401:
        return Unauthorized(url)
    if kind in NO_SUCH_JOB and call.job_id is not None:
        return JobNotFound(call.job_id)
    if status == 413 and call.method == "PUT":
        return PackageError(text)
    if kind == "spec-error":
        return SpecError(problem.faults)
    return ERRORS.get(kind, BY_STATUS.get(status, ControllerUnavailable))(text)


def problem_of(answer: httpx.Response) -> Problem:
    """Return what the answer says of itself; nothing when it is no problem document (a proxy's page, say)."""
    try:
        return PROBLEM.validate_json(answer.content)
    except ValidationError:
        return Problem()


def versions_of(answer: httpx.Response) -> str:
    """Return, where server and client differ, what to do about it."""
    theirs = answer.headers.get(VERSION_HEADER, __version__)
    if theirs == __version__:
        return ""
    return f"; it is raycontrol {theirs}, this client {__version__}: install the same version here"


def retry_after_s(answer: httpx.Response) -> float:
    """Return for how long the server does not want to be asked; a date in place of seconds counts as no wish."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def trouble_of(error: httpx.RequestError, url: str) -> str:
    """Return what went wrong, and whether one side may speak TLS and the other not."""
    text = (str(error) or type(error).__name__).rstrip(".")
    if isinstance(error, httpx.RemoteProtocolError) and urlsplit(url).scheme == "http":
        return f"{text}; does it speak https?"
    if "WRONG_VERSION_NUMBER" in reasons_of(error):
        return f"{text}; does it speak plain http?"
    return text


def unreachable(error: httpx.RequestError) -> type[ServerUnreachable]:
    return ServerNotTrusted if NOT_TRUSTED in reasons_of(error) else ServerUnreachable


def never_passes(error: httpx.RequestError) -> bool:
    return bool(reasons_of(error) & NEVER_PASSES)


def reasons_of(error: BaseException) -> set[str]:
    """Return why TLS failed, in the words of OpenSSL, from the error and those behind it."""
    reasons = set()
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, ssl.SSLError) and behind.reason:
            reasons.add(behind.reason)
        behind = behind.__cause__ or behind.__context__
    return reasons
