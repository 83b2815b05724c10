"""raycontrol runs training jobs over the nodes of a Ray cluster, by the start commands they already have.

It runs PyTorch DDP (torchrun, torch.distributed.launch, plain scripts), MPI (mpirun, mpiexec), Horovod (horovodrun),
TensorFlow with and without parameter servers, and Ray programs, which get a Ray cluster of the job's own.

``Client`` is the door for programs, ``raycontrol`` (the command) the one for people.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raycontrol.version import __version__

if TYPE_CHECKING:
    from raycontrol.client import Client, JobHandle
    from raycontrol.errors import RaycontrolError, SpecError
    from raycontrol.spec import JobSpec
    from raycontrol.status import Event, JobInfo, JobState, Reason, Verdict

__all__ = [
    "Client",
    "Event",
    "JobHandle",
    "JobInfo",
    "JobSpec",
    "JobState",
    "RaycontrolError",
    "Reason",
    "SpecError",
    "Verdict",
    "__version__",
]

_HOMES = {
    "Client": "client",
    "JobHandle": "client",
    "RaycontrolError": "errors",
    "SpecError": "errors",
    "JobSpec": "spec",
    "Event": "status",
    "JobInfo": "status",
    "JobState": "status",
    "Reason": "status",
    "Verdict": "status",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that ``import raycontrol`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"raycontrol.{_HOMES[name]}"), name)
