"""What a person or a site may choose: environment variables, then ``<home>/settings.yaml``, then defaults.

No other module reads the environment for raycontrol's own settings. An empty variable counts as unset.
"""

from __future__ import annotations

import difflib
import math
import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from raycontrol import presets
from raycontrol.errors import UsageError
from raycontrol.specparts import Site
from raycontrol.status import Policy

FILE_NAME = "settings.yaml"
DEFAULT_HOME = "~/.raycontrol"
FENCE_LEAST_S, FENCE_MOST_S = 25, 3600


@dataclass(frozen=True)
class Settings:
    """One process's settings, checked.

    ``home`` is kept as written, so that another machine can resolve a ``~`` for itself; ``home_path`` resolves
    it here. ``cluster`` names the cluster in the store (default: its GCS address), ``address`` is Ray's.
    ``keep_days`` and ``keep_gib`` limit what finished jobs keep; ``package_cap_mib`` is the largest working
    directory that is packed; below ``min_free_mib`` of free space nothing is shipped to the archive;
    ``scratch`` is where instances work on their node (default: Ray's session folder); ``shared_dir`` is a folder that all nodes
    mount, for outputs; ``ray_tmpdir`` is below
    which folder Ray keeps its own. Jobs that leave it open get ``rdma_preset``, RDMA by itself only on nodes with
    ``rdma_min_gpus`` GPUs, and an event when their GPUs were idle for ``idle_gpu_warn_s`` seconds (0: none).
    ``queue_policy`` says what a job that does not fit means for those behind it (``status.Policy``); at a time so many jobs
    may have nodes, and so many GPUs: ``user_jobs`` and ``user_gpus`` of one user, ``all_jobs`` and ``all_gpus`` of all.
    What an attempt runs on a host that cannot reach the head's host for ``fence_s`` seconds is ended there.
    ``topology_labels`` names the labels of nodes that say where they stand, the widest first: neighbours get neighbouring ranks.
    ``url`` is where `raycontrol serve` answers, which clients then use instead of Ray, with ``token`` or what
    ``token_file`` holds; ``insecure_http`` lets them send it over plain http to other machines. ``sources`` says, by
    field, where a value that is not a default came from.
    """

    home: str = DEFAULT_HOME
    cluster: str | None = None
    address: str | None = None
    user: str = "unknown"
    keep_days: float = 30
    keep_gib: float = 50
    package_cap_mib: int = 512
    min_free_mib: int = 200
    scratch: str | None = None
    shared_dir: str | None = None
    ray_tmpdir: str = "/tmp"
    rdma_preset: str = "auto"
    rdma_min_gpus: int = 8
    idle_gpu_warn_s: float = 600
    queue_policy: str = "traverse"
    user_jobs: int | None = None
    user_gpus: float | None = None
    all_jobs: int | None = None
    all_gpus: float | None = None
    fence_s: float = 50
    spare_workers: int = 1
    topology_labels: str = "topology.kubernetes.io/zone,ray.io/availability-zone,rack,switch"
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    insecure_http: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read ``environ`` and the file in the home folder. Raises UsageError, naming variable or field."""
        values: dict[str, Any] = {"user": _login_name(environ)}
        sources: dict[str, str] = {}
        for name, setting in FIELDS.items():
            if text := environ.get(setting.variable):
                values[name] = _parsed(setting, text, setting.variable)
                sources[name] = setting.variable
        path = _expanded(values.get("home", DEFAULT_HOME)) / FILE_NAME
        for name, raw in _read_file(path).items():
            value = _parsed(FIELDS[name], raw, f"{path}: {name}")
            if name not in sources:
                values[name] = value
                sources[name] = str(path)
        return cls(**values, sources=sources)

    @classmethod
    def of_home(cls, home: str) -> Settings:
        """Read the settings that hold in this home folder, whatever RAYCONTROL_HOME says."""
        return cls.load({**os.environ, FIELDS["home"].variable: home})

    @property
    def home_path(self) -> Path:
        """The home folder on this machine. Raises UsageError when ``~`` has no meaning here."""
        return _expanded(self.home)

    @property
    def package_cap_bytes(self) -> int:
        return self.package_cap_mib * 1024**2

    @property
    def min_free_bytes(self) -> int:
        return self.min_free_mib * 1024**2

    @property
    def site(self) -> Site:
        """What jobs get that leave it open."""
        return Site(self.rdma_preset, self.rdma_min_gpus, self.idle_gpu_warn_s)

    def http_token(self) -> str | None:
        """The secret for ``url``: ``token``, else what ``token_file`` holds. Raises UsageError, without the secret in it."""
        if self.token is not None or self.token_file is None:
            return self.token
        variable = FIELDS["token_file"].variable
        path = _expanded(self.token_file, variable)
        try:
            return checked_token(path.read_text(encoding="ascii", errors="replace").strip())
        except OSError as error:
            raise UsageError(f"{variable}: {path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{variable}: {path}: its content {error}") from None

    def variables(self) -> dict[str, str]:
        """The environment variables by which another process comes to the same settings, secrets left out."""
        chosen = {item.variable: getattr(self, name) for name, item in FIELDS.items() if not item.secret}
        return {variable: str(value) for variable, value in chosen.items() if value is not None}

    def describe(self) -> dict[str, str]:
        """Every setting as text with where it came from, fit to be shown: no secrets, no user and password of an address."""
        return {
            name: f"{_shown(getattr(self, name), setting)} ({self.sources.get(name, 'default')})"
            for name, setting in FIELDS.items()
        }


def process_environment() -> Mapping[str, str]:
    """Return this process's environment, for what its user wants to have taken from there."""
    return os.environ


@dataclass(frozen=True)
class Field:
    """A setting: the variable that sets it, and a function that returns its value or raises ValueError(rule).

    The value of a ``secret`` one is never shown, a wrong one neither.
    """

    variable: str
    parse: Callable[[Any], Any]
    secret: bool = False


def _shown(value: object, setting: Field) -> str:
    if value is None:
        return "not set"
    if setting.secret:
        return "set"
    return f"{value:g}" if isinstance(value, float) else _without_login(str(value))


def _parsed(setting: Field, raw: object, subject: str) -> object:
    try:
        return setting.parse(raw)
    except ValueError as error:
        if setting.secret:
            raise UsageError(f"{subject}: {error}") from None
        shown = _without_login(raw) if isinstance(raw, str) else raw
        raise UsageError(f"{subject}: {error}, got {shown!r}") from None


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("must be text")
    if not raw.isprintable() or raw.strip() != raw or not 0 < len(raw) <= 256:
        raise ValueError("must be 1 to 256 printable characters without space around them")
    return raw


def _path(raw: object) -> str:
    if not isinstance(raw, str) or "\0" in raw or not raw.startswith(("/", "~")):
        raise ValueError("must be an absolute path or start with ~")
    return raw


def _absolute(raw: object) -> str:
    if not isinstance(raw, str) or "\0" in raw or not raw.startswith("/") or not raw.strip("/"):
        raise ValueError("must be an absolute path")
    return raw


def _amount(raw: object) -> float:
    rule = "must be a number of at least 0"
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        raise ValueError(rule)
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        raise ValueError(rule) from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(rule)
    return number


def _whole(least: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        rule = f"must be a whole number of at least {least}"
        try:
            number = _amount(raw)
        except ValueError:
            raise ValueError(rule) from None
        if not number.is_integer() or number < least:
            raise ValueError(rule)
        return int(number)

    return parse


def _fence(raw: object) -> float:
    """At least as long as Ray, started with ``raysettings``, takes to give a silent host up (16 s), and two looks at the head
    (``fence``): a host must not end what it runs in a cut of the network that Ray forgives. At most an hour: for so long the
    job of a lost host waits for its next attempt."""
    rule = f"must be from {FENCE_LEAST_S} seconds, longer than Ray takes to give a silent host up, to {FENCE_MOST_S}"
    try:
        seconds = _amount(raw)
    except ValueError:
        raise ValueError(rule) from None
    if not FENCE_LEAST_S <= seconds <= FENCE_MOST_S:
        raise ValueError(rule)
    return seconds


def _preset(raw: object) -> str:
    if raw not in presets.names():
        raise ValueError(f"must be one of {', '.join(presets.names())}")
    return str(raw)


def _policy(raw: object) -> str:
    try:
        return str(Policy(raw))
    except ValueError:
        raise ValueError(f"must be one of {', '.join(Policy)}") from None


def _labels(raw: object) -> str:
    names = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(names, list) or not all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name.strip()) for name in names
    ):
        raise ValueError("must be names of labels with commas between them, such as rack,switch")
    return ",".join(name.strip() for name in names)


def _flag(raw: object) -> bool:
    word = raw.lower() if isinstance(raw, str) else raw
    if word in (True, "1", "true"):
        return True
    if word in (False, "0", "false"):
        return False
    raise ValueError("must be 1 or 0")


def checked_url(raw: object) -> str:
    """Return the URL of a server without a slash at its end; raises ValueError(rule)."""
    rule = "must be a URL such as https://head:8642, without a user, a query or a fragment"
    text = raw if isinstance(raw, str) else ""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ValueError(rule) from None
    if not usable or "@" in parts.netloc or {*text} & {"?", "#", "\\"} or not _is_plain(text):
        raise ValueError(rule)
    return text.rstrip("/")


def checked_token(raw: object) -> str:
    """Return a secret that can stand in a header; raises ValueError(rule), which does not tell it."""
    if not isinstance(raw, str) or len(raw) > 512 or not _is_plain(raw):
        raise ValueError("must be 1 to 512 printable ASCII characters without spaces")
    return raw


def _is_plain(text: str) -> bool:
    return re.fullmatch(r"[!-~]+", text) is not None


FIELDS: Mapping[str, Field] = {
    "home": Field("RAYCONTROL_HOME", _path),
    "cluster": Field("RAYCONTROL_CLUSTER", _text),
    "address": Field("RAY_ADDRESS", _text),
    "user": Field("RAYCONTROL_USER", _text),
    "keep_days": Field("RAYCONTROL_KEEP_DAYS", _amount),
    "keep_gib": Field("RAYCONTROL_KEEP_GIB", _amount),
    "package_cap_mib": Field("RAYCONTROL_PACKAGE_CAP_MIB", _whole(1)),
    "min_free_mib": Field("RAYCONTROL_MIN_FREE_MIB", _whole(0)),
    "scratch": Field("RAYCONTROL_SCRATCH", _path),
    "shared_dir": Field("RAYCONTROL_SHARED_DIR", _absolute),
    "ray_tmpdir": Field("RAY_TMPDIR", _path),
    "rdma_preset": Field("RAYCONTROL_RDMA_PRESET", _preset),
    "rdma_min_gpus": Field("RAYCONTROL_RDMA_MIN_GPUS", _whole(1)),
    "idle_gpu_warn_s": Field("RAYCONTROL_IDLE_GPU_WARN_S", _amount),
    "queue_policy": Field("RAYCONTROL_QUEUE_POLICY", _policy),
    "user_jobs": Field("RAYCONTROL_USER_JOBS", _whole(1)),
    "user_gpus": Field("RAYCONTROL_USER_GPUS", _amount),
    "all_jobs": Field("RAYCONTROL_ALL_JOBS", _whole(1)),
    "all_gpus": Field("RAYCONTROL_ALL_GPUS", _amount),
    "fence_s": Field("RAYCONTROL_FENCE_S", _fence),
    "spare_workers": Field("RAYCONTROL_SPARE_WORKERS", _whole(0)),
    "topology_labels": Field("RAYCONTROL_TOPOLOGY_LABELS", _labels),
    "url": Field("RAYCONTROL_URL", checked_url),
    "token": Field("RAYCONTROL_TOKEN", checked_token, secret=True),
    "token_file": Field("RAYCONTROL_TOKEN_FILE", _path),
    "insecure_http": Field("RAYCONTROL_INSECURE_HTTP", _flag),
}


def _read_file(path: Path) -> dict[str, object]:
    """The settings of the file, by name; nothing when there is no file. ``null`` leaves a setting alone."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must hold `name: value` lines")
    for name in content:
        _check_name(path, name)
    return {name: value for name, value in content.items() if value is not None}


def _check_name(path: Path, name: object) -> None:
    if name == "home":
        raise UsageError(f"{path}: home: cannot be set by a file inside it; set RAYCONTROL_HOME")
    if name not in FIELDS:
        near = difflib.get_close_matches(str(name), FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(list(FIELDS)[1:])}"
        raise UsageError(f"{path}: {name}: no such setting; {hint}")


def _one_line(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    mark = getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem).split())}"


def _expanded(path: str, variable: str = "RAYCONTROL_HOME") -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{variable}: {path!r} names no user's home here; give an absolute path") from None


def _login_name(environ: Mapping[str, str]) -> str:
    """As ``getpass.getuser``, but from the given environment, and with an answer for a uid without a name."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        if environ.get(variable):
            return environ[variable]
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def _without_login(text: str) -> str:
    """``ray://user:secret@host`` without the part before the ``@``."""
    try:
        login, at, _ = urlsplit(text).netloc.rpartition("@")
    except ValueError:
        return text
    return text.replace(login + at, "", 1) if at else text
