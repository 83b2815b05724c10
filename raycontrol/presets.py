"""Presets: sets of variables for RDMA networks, as files of the package (``configs/presets/<name>.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

FOLDER = Path(__file__).parent / "presets"
DETECTED = frozenset({"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"})
"""Variables whose values can be read from a node."""


@dataclass(frozen=True)
class Preset:
    """``variables`` are the same on every node; those named in ``detect`` get values from each node's own facts."""

    name: str
    about: str
    variables: Mapping[str, str]
    detect: frozenset[str]


@cache
def names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def preset(name: str) -> Preset:
    """Return a preset; raises KeyError when there is none of that name."""
    if name not in names():
        raise KeyError(name)
    content = YAML(typ="safe", pure=True).load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    detect = frozenset(content.get("detect", ()))
    assert detect <= DETECTED, f"preset {name}: cannot detect {sorted(detect - DETECTED)}"
    return Preset(name, content["about"], dict(content["variables"]), detect)
