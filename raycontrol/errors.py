"""Every error that raycontrol raises on purpose.

::

    RaycontrolError                 exit status 125
    ├── UsageError                  2    wrong call or argument; nothing was changed
    │   ├── SpecError               2    a spec with all of its faults
    │   ├── IdTaken                 2    a job id that another user's job has, or a removed one had
    │   └── KeyReused               2    an idempotency key that stands for another request
    ├── JobNotFound                 2    no job of that id (or more than one of that prefix)
    ├── PackageError                2    the working directory cannot be packed or unpacked
    ├── Unauthorized                2    over HTTP: no token, or one that does not hold (any more)
    ├── Forbidden                   2    over HTTP: the token's role or user may not do this
    ├── ServerUnreachable           125  no raycontrol server answers at the URL
    │   └── ServerNotTrusted        125  what answers there shows a certificate that is not trusted
    ├── ClusterUnreachable          125  no Ray cluster answers at the address
    ├── ControllerUnavailable       125  the cluster is there, its controller does not answer
    ├── HeadFault                   125  a call to the head failed as nobody foresaw; asking again would not help
    ├── VersionMismatch             125  client and controller are of different versions
    ├── StoreError                  125  the store cannot be opened, read or written
    │   ├── StoreRefused            125  a change that the store will never take
    │   │   └── JobIsThere          125  a new job of an id that the store has, or of a key that is used
    │   └── StoreOwned              125  another controller of this cluster name owns the store
    ├── PlanError                   125  a backend cannot make a plan from these facts
    └── WaitTimeout                 124  the job had not ended when the wait's time was over

The arguments of each class are plain values and go to ``super().__init__`` unchanged, so that an error
survives pickling on its way through Ray; the text is made in ``__str__``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class RaycontrolError(Exception):
    """The base of all errors of this package; ``str(error)`` says what to do next."""

    exit_status = 125


class UsageError(RaycontrolError):
    """A call that cannot be carried out as it stands; nothing was changed."""

    exit_status = 2


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec.

    ``field`` is the dotted path (``groups.worker.count``; empty for the document itself), ``rule`` what must
    hold, ``got`` the value as the user would write it. ``line`` and ``column`` count from 1 and are ``None``
    when the spec did not come from a file.
    """

    field: str
    rule: str
    got: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}, column {self.column}: " if self.line is not None else ""
        subject = f"{self.field}: " if self.field else ""
        value = f", got {self.got}" if self.got is not None else ""
        return f"{place}{subject}{self.rule}{value}"


class SpecError(UsageError):
    """A spec that breaks rules; ``faults`` holds every one of them, in the order of the document."""

    def __init__(self, faults: tuple[Fault, ...], source: str | None = None) -> None:
        super().__init__(faults, source)
        self.faults = faults
        self.source = source

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        if len(self.faults) == 1:
            return f"{where}{self.faults[0]}"
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        return f"{where}{len(self.faults)} faults in the job's spec:\n{lines}"


class IdTaken(UsageError):
    """Another user's job has the id that a new job was to have, or one that was ``removed`` had it."""

    def __init__(self, job_id: str, removed: bool = False) -> None:
        super().__init__(job_id, removed)
        self.job_id = job_id
        self.removed = removed

    def __str__(self) -> str:
        why = "was used by a job that has been removed" if self.removed else "is taken"
        return f"job id {self.job_id!r} {why}; choose another"


class KeyReused(UsageError):
    """An idempotency key came with another request than the one that it was first used for."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"idempotency key {self.key!r} was used for another request; choose a new key for this one"


class JobNotFound(RaycontrolError):
    """No job has this id; ``candidates`` are jobs whose ids start with it, when there are several."""

    exit_status = 2

    def __init__(self, job_id: str, candidates: tuple[str, ...] = ()) -> None:
        super().__init__(job_id, candidates)
        self.job_id = job_id
        self.candidates = candidates

    def __str__(self) -> str:
        if self.candidates:
            return f"job {self.job_id!r} is not unique: {', '.join(self.candidates)}; give more of the id"
        return f"no job {self.job_id!r}; `raycontrol list --all` shows the ids"


class PackageError(RaycontrolError):
    """The working directory cannot be packed, or a package cannot be unpacked safely."""

    exit_status = 2


class ClusterUnreachable(RaycontrolError):
    """No Ray cluster answers at ``address``."""

    def __init__(self, address: str, detail: str = "") -> None:
        super().__init__(address, detail)
        self.address = address
        self.detail = detail

    @property
    def reason(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"no Ray cluster answers at {self.address}{detail}"

    def __str__(self) -> str:
        return (
            f"{self.reason}; start one with `ray start --head`, or name another with --address or RAY_ADDRESS"
        )


class Unauthorized(RaycontrolError):
    """The server at ``url`` does not know who asks."""

    exit_status = 2

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    def __str__(self) -> str:
        return (
            f"{self.url} refused the token: it is missing, wrong, expired or revoked; set RAYCONTROL_TOKEN to one "
            "that an admin made with `raycontrol token create`"
        )


class Forbidden(RaycontrolError):
    """The server knows who asks, and refuses; ``str(error)`` says what its role would have to be."""

    exit_status = 2


class ServerUnreachable(RaycontrolError):
    """No raycontrol server answers at ``url``."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(url, detail)
        self.url = url
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"no raycontrol server answers at {self.url} ({self.detail}); is `raycontrol serve` running there, and "
            "RAYCONTROL_URL right? On a node of the cluster --address reaches it without a server"
        )


class ServerNotTrusted(ServerUnreachable):
    """What answers at ``url`` shows a certificate that is not trusted here, or is not for this name."""

    def __str__(self) -> str:
        return (
            f"the certificate of {self.url} is not trusted here ({self.detail}); it has to be for the name in the URL, and "
            "signed by one whom this machine trusts: SSL_CERT_FILE may name a file of certificates to trust"
        )


class ControllerUnavailable(RaycontrolError):
    """The cluster answers, but its controller does not; ``str(error)`` says why and what to try."""


class HeadFault(RaycontrolError):
    """Controller or archive answered with an error that is none of this package's: a fault of ours, to be reported.

    ``reason`` is that error in one line; its traceback is the ``__cause__``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"a call to the head failed: {self.reason}"


class VersionMismatch(RaycontrolError):
    """Client and controller are of different versions of raycontrol."""

    def __init__(self, client: str, controller: str) -> None:
        super().__init__(client, controller)
        self.client = client
        self.controller = controller

    def __str__(self) -> str:
        differ = f"this client is raycontrol {self.client}, the cluster's controller is {self.controller}"
        if _release(self.client) < _release(self.controller):
            return f"{differ}; install raycontrol {self.controller} here"
        return (
            f"{differ}; install raycontrol {self.client} on every node, then `raycontrol controller restart` (running "
            f"jobs go on), or raycontrol {self.controller} here"
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 10) for 0.10rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


class StoreError(RaycontrolError):
    """The store cannot be opened, read or written."""


class StoreRefused(StoreError):
    """The store will never take this change: the job is not there, or has ended, or the text is not Unicode."""


class JobIsThere(StoreRefused):
    """The store has a job of this id, or one that came of this key."""


class StoreOwned(StoreError):
    """Another living controller of this cluster name owns the store."""

    def __init__(self, cluster: str, holder: str) -> None:
        super().__init__(cluster, holder)
        self.cluster = cluster
        self.holder = holder

    def __str__(self) -> str:
        return (
            f"the store already has a controller for cluster {self.cluster!r}: {self.holder}; stop that one, "
            "or give this cluster a name of its own with RAYCONTROL_CLUSTER"
        )


class PlanError(RaycontrolError):
    """A backend cannot make a plan from a job's spec and facts."""


class WaitTimeout(RaycontrolError):
    """The job had not ended when the wait's time was over; it runs on."""

    exit_status = 124

    def __init__(self, job_id: str, timeout_s: float) -> None:
        super().__init__(job_id, timeout_s)
        self.job_id = job_id
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"job {self.job_id} had not ended after {self.timeout_s:g} s; it runs on"
