"""MPI: programs that an ``mpirun`` starts, unchanged, on every slot of the job.

``NODE_IP_SLOT_LIST`` and ``OMPI_MCA_orte_default_hostfile`` are TI-ONE's names. Where the start command runs is the
spec's ``run_on``; calls of MPI launchers in it meet (``raycontrol/standin.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from raycontrol.backends import ssh, world
from raycontrol.backends.contract import environments, merged, start, warnings
from raycontrol.plan import Brief, Cause, Facts, Plan, PlannedRun, shell_argv
from raycontrol.spec import JobSpec, Member, RunOn, members, runs_everywhere


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """Endpoints open, ssh is proved, the start command runs where ``run_on`` says."""
    gang = members(spec)
    hosts = world.hosts_of(gang, facts)
    own = world.variables(hosts, facts)
    environment = world.with_shared_gpus(environments(spec, brief, facts, own), hosts)
    everywhere = runs_everywhere(spec)
    starting = gang if everywhere else gang[:1]
    return Plan(
        mode=spec.mode,
        environment=environment,
        files=merged(ssh.files(gang, facts), world.files(hosts, facts, environment, spec.run_on)),
        stages=(*ssh.stages(gang), start({member.name: _run(spec, member) for member in starting})),
        deciders=frozenset(member.name for member in starting),
        warnings=(*warnings(spec, gang), *world.warnings(spec)),
        meeting=tuple(member.name for member in starting),
    )


def leases(member: Member) -> tuple[str, ...]:
    """The port of MASTER_PORT, on the node of instance 0."""
    return ("master",) if member.index == 0 else ()


def explain(lines: Sequence[str]) -> Cause | None:
    """Read what mpirun or horovodrun says of the rank that failed."""
    return world.explain(lines)


def _run(spec: JobSpec, member: Member) -> PlannedRun:
    if spec.run_on is not RunOn.RANKS:
        return PlannedRun("start", member.command, pipefail=spec.pipefail, cwd=spec.cwd)
    ranks = str(sum(one.slots for one in members(spec)))
    words = ("mpirun", "-n", ranks, *shell_argv(member.command, spec.pipefail))
    return PlannedRun("start", words, cwd=spec.cwd)
