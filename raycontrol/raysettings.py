"""The settings that a cluster's Ray should be started with: what ``raycontrol ray-env`` prints, and the doctor looks for.

Ray reads them from the environment of ``ray start``: most from ``RAY_CONFIG`` in its ``ray_config_def.h``, by the name
there with ``RAY_`` before it, letter case and all. What was measured of them is in docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from raycontrol.status import Word


class Reader(Word):
    """Whose environment a setting is read from: of the GCS, which is on the head alone, of every node's raylet, or of both."""

    GCS = "gcs"
    RAYLET = "raylet"
    BOTH = "both"


class RaySetting(NamedTuple):
    """``why`` is the sentence of the docs; ``part`` is what a list must contain to do (None: the whole value must be this)."""

    name: str
    value: str
    reader: Reader
    why: str
    part: str | None = None

    @property
    def head_only(self) -> bool:
        return self.reader is Reader.GCS

    def holds(self, found: str | None) -> bool:
        if self.part is not None:
            return found is not None and self.part in found.split(",")
        return found == self.value


PRELOADED = (
    "raycontrol.actors",
    "pyarrow",
    "numpy",
    "pydantic",
    "ray._common.pydantic_compat",
    "ray.util.serialization_addons",
)
"""What a fresh worker spends its first half second on importing when it becomes an instance's actor."""

SETTINGS = (
    RaySetting(
        "RAY_health_check_period_ms", "1000", Reader.GCS, "how often the head asks a node whether it is there"
    ),
    RaySetting(
        "RAY_health_check_timeout_ms", "3000", Reader.GCS, "how long the head waits for a node's answer"
    ),
    RaySetting(
        "RAY_health_check_failure_threshold",
        "4",
        Reader.GCS,
        "so many questions without an answer, and the node is lost",
    ),
    RaySetting(
        "RAY_grpc_client_keepalive_timeout_ms",
        "16000",
        Reader.BOTH,
        "a call to a host that fell silent fails after so long, and holds up the other nodes no longer",
    ),
    RaySetting(
        "RAY_preload_python_modules",
        ",".join(PRELOADED),
        Reader.RAYLET,
        "fresh workers have imported what an instance's actor needs before one is asked for",
        part=PRELOADED[0],
    ),
    RaySetting(
        "RAY_worker_niceness",
        "0",
        Reader.RAYLET,
        "raycontrol's actors, and jobs that do not run as root, get their share of a busy node's CPUs",
    ),
)

STORAGE = "RAY_gcs_storage"
STORAGE_FOLDER = "RAY_gcs_storage_path"


def variables(
    *, head: bool, storage: str | None = None, is_installed: Callable[[str], bool] = lambda module: True
) -> dict[str, str]:
    """Return the variables for ``ray start`` on the head, or on another node; ``storage`` is the folder of Ray's tables.

    Modules that are not installed are not preloaded: every worker's log would tell of each.
    """
    found = {setting.name: setting.value for setting in SETTINGS if head or not setting.head_only}
    found["RAY_preload_python_modules"] = ",".join(module for module in PRELOADED if is_installed(module))
    if storage is not None:
        found |= {STORAGE: "rocksdb", STORAGE_FOLDER: storage}
    return found


def known(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that an environment has, and nothing else of it."""
    return {setting.name: environment[setting.name] for setting in SETTINGS if setting.name in environment}
