"""Paths that exist for a job only: its spec's ``mounts`` and, in modes that have a hostfile, TI-ONE's path of it."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from raycontrol import specmounts
from raycontrol.errors import PlanError
from raycontrol.plan import Facts, Mount
from raycontrol.spec import JobSpec, Member, Mode, members

HOSTFILE = "/etc/mpi/hostfile"
"""Where TI-ONE has the hostfile of an MPI job."""
HAVE_HOSTFILE = (Mode.MPI, Mode.HOROVOD)


def mounts(spec: JobSpec, facts: Sequence[Facts]) -> dict[str, tuple[Mount, ...]]:
    """Return what each instance's runs find mounted; nothing for a job without mounts. Raises PlanError."""
    gang = members(spec)
    found = {
        member.name: (*_wanted(spec, fact), *_hostfile(spec, gang, fact))
        for member, fact in zip(gang, facts, strict=True)
    }
    return found if any(found.values()) else {}


def _wanted(spec: JobSpec, fact: Facts) -> tuple[Mount, ...]:
    wanted = specmounts.wanted(spec.mounts)
    for mount in wanted:
        hidden = next((path for path in _needed(fact) if _is_at_or_below(path, mount.target)), None)
        if hidden is not None:
            raise PlanError(
                f"mounts: {mount.target} would hide {hidden}, which {fact.instance} needs on {fact.node_name}"
            )
    return tuple(Mount(_source(mount.source, fact), mount.target, mount.read_only) for mount in wanted)


def _needed(fact: Facts) -> tuple[str, ...]:
    return (fact.private_dir, fact.code_dir, fact.output_dir, fact.python, fact.package_dir)


def _source(source: str, fact: Facts) -> str:
    return posixpath.normpath(posixpath.join(fact.code_dir, source))


def _hostfile(spec: JobSpec, gang: Sequence[Member], fact: Facts) -> tuple[Mount, ...]:
    """Where ``/etc/mpi`` does not exist, it takes a cover over ``/etc``, in which a job of root could not make entries any
    more: only for a job whose command names the file.
    """
    if spec.mode not in HAVE_HOSTFILE or any(_meets(HOSTFILE, target) for target in _targets(spec.mounts)):
        return ()
    beside = None if any(_names_it(member.command) for member in gang) else posixpath.dirname(HOSTFILE)
    return (Mount(f"{fact.private_dir}/hostfile", HOSTFILE, optional=True, beside=beside),)


def _targets(written: Mapping[str, str]) -> list[str]:
    return [mount.target for mount in specmounts.wanted(written)]


def _names_it(command: str | tuple[str, ...]) -> bool:
    return HOSTFILE in (command if isinstance(command, str) else " ".join(command))


def _meets(one: str, other: str) -> bool:
    return _is_at_or_below(one, other) or _is_at_or_below(other, one)


def _is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
