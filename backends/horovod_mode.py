"""Horovod: a ``horovodrun`` line that runs once, on the launcher; the workers serve its ranks through ssh."""

from __future__ import annotations

from collections.abc import Sequence

from raycontrol.backends import ssh, world
from raycontrol.backends.contract import environments, merged, start, warnings
from raycontrol.plan import Brief, Cause, Facts, Plan, PlannedRun
from raycontrol.spec import JobSpec, Member, RunOn, members


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """Endpoints open, ssh is proved, the start command runs on the launcher."""
    gang = members(spec)
    launcher = gang[0]
    hosts = world.hosts_of(gang, facts)
    own = {fact.instance: world.variables(hosts, facts, fact) for fact in facts}
    environment = world.with_shared_gpus(environments(spec, brief, facts, own), hosts)
    run = PlannedRun("start", launcher.command, pipefail=spec.pipefail, cwd=spec.cwd)
    return Plan(
        mode=spec.mode,
        environment=environment,
        files=merged(ssh.files(gang, facts), world.files(hosts, facts, environment, RunOn.LAUNCHER)),
        stages=(*ssh.stages(gang), start({launcher.name: run})),
        deciders=frozenset([launcher.name]),
        warnings=(*warnings(gang), *world.warnings(spec)),
        meeting=(launcher.name,),
    )


def leases(member: Member) -> tuple[str, ...]:
    """The port of MASTER_PORT, on the node of instance 0."""
    return ("master",) if member.index == 0 else ()


def explain(lines: Sequence[str]) -> Cause | None:
    """Read what horovodrun, or the mpirun that it calls, says of the rank that failed."""
    return world.explain(lines)
