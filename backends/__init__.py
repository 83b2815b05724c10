"""Backends: what each mode makes of a spec and facts. Pure functions, one module a mode, imported on use.

A mode's module has three functions:

``plan(spec, brief, facts) -> Plan``
    everything that will be done, as a value;
``leases(member) -> tuple[str, ...]``
    the purposes for which that instance has to lease a port on its node before the plan is made;
``explain(lines) -> Cause | None``
    the rank and code that the mode's launcher names in a failed instance's last lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from raycontrol.backends import common
from raycontrol.backends.world import AGENT
from raycontrol.errors import PlanError
from raycontrol.plan import Brief, Cause, Facts, Plan
from raycontrol.spec import Group, JobSpec, Member, Mode, members, serves_ssh

_MODULES = {
    Mode.DDP: "raycontrol.backends.ddp_mode",
    Mode.MPI: "raycontrol.backends.mpi_mode",
    Mode.HOROVOD: "raycontrol.backends.horovod_mode",
    Mode.PS: "raycontrol.backends.ps_mode",
    Mode.RAY: "raycontrol.backends.ray_mode",
}


LOCAL_PORTS = {"master": "29500", "tf": "2222"}
LEFT_OUT = ("RAYCONTROL_ATTEMPT_ID", "CUDA_VISIBLE_DEVICES")
"""What ``local_environment`` leaves out beside paths."""


def make_plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """Return the plan of one attempt from the facts of all its instances, in the order of INDEX; raises PlanError."""
    try:
        plan: Plan = _backend(spec.mode).plan(spec, brief, facts)
    except KeyError as missing:  # as when another version of raycontrol has prepared the instances
        raise PlanError(
            f"mode {spec.mode} needs a port for {missing}, which an instance has not reported"
        ) from None
    return common.completed(plan, spec, facts)


def leases(mode: Mode, member: Member) -> tuple[str, ...]:
    """Return the purposes for which this instance leases a port of its node."""
    purposes: tuple[str, ...] = _backend(mode).leases(member)
    return purposes


def explain(mode: Mode, lines: Sequence[str]) -> Cause | None:
    """Return what the mode's launcher says, in its last lines, of the rank that failed."""
    return common.advised(_backend(mode).explain(lines), lines)


def plan_of(spec: JobSpec, facts: tuple[Facts, ...] | None = None) -> Plan:
    """Return the plan of a job that has not been submitted; without ``facts`` addresses and ports are symbolic.

    Of a range of nodes it is the plan of the largest.
    """
    spec = spec.largest
    name = spec.name or "<job name>"
    brief = Brief(
        job_id="<job id>",
        job_name=name,
        attempt=0,
        attempt_id="<attempt id>",
        array_index="<array index>" if spec.array is not None else None,
    )
    return make_plan(spec, brief, facts or tuple(_symbolic(spec, member) for member in members(spec)))


def local_environment(mode: Mode) -> dict[str, str]:
    """Return the environment contract as one process on this machine would see it, for trying a script by hand.

    Left out are the mark by which processes of a job are found and killed, the limit on visible GPUs, and paths to what
    only a job has (hostfiles, agents).
    """
    alone = {"groups": {"ps": Group(count=0), "worker": Group()}} if mode is Mode.PS else {"nodes": 1}
    spec = JobSpec.from_dict({"mode": mode, "command": "true", "name": "local", **alone})
    (member,) = members(spec)
    facts = Facts(
        instance=member.name,
        ip="127.0.0.1",
        node_name="localhost",
        ports={purpose: "0" for purpose in _purposes(spec, member)} | LOCAL_PORTS,
        interface="lo",
        code_dir=".",
        output_dir="./outputs",
    )
    brief = Brief(job_id="local", job_name="local", attempt=0, attempt_id="local.0")
    environment = make_plan(spec, brief, (facts,)).environment[facts.instance]
    return {
        name: value
        for name, value in environment.items()
        if value is not None and name not in LEFT_OUT and not _of_a_job(name, value)
    }


def _of_a_job(name: str, value: str) -> bool:
    """Whether a variable names what only a job has: files, the agent, a network of several nodes, a Ray cluster."""
    of_mpi = value == AGENT or name.endswith(("_if_include", "HYDRA_IFACE"))
    of_ray = name.startswith(("HEAD_", "RAY_", "SPT_", "BASH_FUNC_")) or name.endswith("_METRIC_PORT")
    return value.startswith("/") or of_mpi or of_ray


def _backend(mode: Mode) -> Any:
    return import_module(_MODULES[mode])


def _purposes(spec: JobSpec, member: Member) -> tuple[str, ...]:
    return ("probe", *leases(spec.mode, member), *(("ssh",) if serves_ssh(spec) else ()))


def _symbolic(spec: JobSpec, member: Member) -> Facts:
    purposes = _purposes(spec, member)
    gpus = int(member.resources.gpu) or (1 if member.resources.gpu > 0 else 0)
    return Facts(
        instance=member.name,
        ip=f"<ip of {member.name}>",
        node_name=f"<node of {member.name}>",
        ports={purpose: f"<{purpose} port of {member.name}>" for purpose in purposes},
        gpus=tuple(f"<gpu {number} of {member.name}>" for number in range(gpus)),
        interface=f"<interface of {member.name}>",
        network=f"<network of {member.name}>",
        code_dir="<code dir>",
        output_dir=f"<output dir of {member.name}>",
        private_dir=f"<private dir of {member.name}>",
        python="<python>",
        package_dir="<raycontrol>",
        login_key=f"<login key of {member.name}>",
        host_key=f"<host key of {member.name}>",
        temp_dir=f"<temp dir of {member.name}>",
        memory=str(member.resources.memory or f"<memory of {member.name}>"),
        object_store=f"<object store of {member.name}>",
    )
