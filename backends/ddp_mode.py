"""DDP: PyTorch's distributed launchers, or plain scripts that call ``init_process_group``.

``WORLD_SIZE`` and ``RANK`` count instances, as TI-ONE's "nodes" do; ``PET_*`` are the defaults that ``torchrun``
reads for its own flags (https://docs.pytorch.org/docs/stable/elastic/run.html), so that a bare ``torchrun train.py``
joins the job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from raycontrol.backends import ssh
from raycontrol.backends.contract import NETWORK_LIMIT_S, environments, start, start_command, warnings
from raycontrol.plan import Brief, Cause, Facts, Plan, Stage, TcpReachable
from raycontrol.spec import JobSpec, Member, members


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """The start command on every instance, once each has reached the master's node."""
    gang = members(spec)
    own = {member.name: _variables(gang, member, facts) for member in gang}
    return Plan(
        mode=spec.mode,
        environment=environments(spec, brief, facts, own),
        files=ssh.files(gang, facts) if spec.ssh else {},
        stages=(
            *_prove_network(facts),
            *(ssh.stages(gang) if spec.ssh else ()),
            start({member.name: start_command(spec, member) for member in gang}),
        ),
        deciders=frozenset(member.name for member in gang),
        warnings=tuple(warnings(spec, gang)),
    )


def leases(member: Member) -> tuple[str, ...]:
    """The rendezvous port, on the node of instance 0."""
    return ("master",) if member.index == 0 else ()


def explain(lines: Sequence[str]) -> Cause | None:
    """Read the report that torchrun prints when a rank has failed: "Root Cause (first observed failure)"."""
    text = "\n".join(lines)
    start = text.rfind("Root Cause (first observed failure)")
    if start < 0:
        return None
    rank = re.search(r"^\s*rank\s*:\s*(\d+)", text[start:], re.MULTILINE)
    code = re.search(r"^\s*exitcode\s*:\s*(-?\d+)", text[start:], re.MULTILINE)
    return Cause(rank=int(rank[1]) if rank else None, exit_code=int(code[1]) if code else None)


def _variables(gang: Sequence[Member], member: Member, facts: Sequence[Facts]) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(len(gang)),
        "RANK": str(member.index),
        "PET_NNODES": str(len(gang)),
        "PET_NPROC_PER_NODE": str(member.slots),
        "PET_NODE_RANK": str(member.index),
        "PET_MASTER_ADDR": facts[0].ip,
        "PET_MASTER_PORT": member.env.get("MASTER_PORT") or facts[0].ports["master"],
    }


def _prove_network(facts: Sequence[Facts]) -> tuple[Stage, ...]:
    if len(facts) == 1:
        return ()
    master = facts[0]
    return (
        Stage(
            name="prove the network",
            says="every instance reaches the master",
            limit_s=NETWORK_LIMIT_S,
            until=tuple(
                TcpReachable(fact.instance, master.instance, master.ip, master.ports["probe"])
                for fact in facts[1:]
            ),
        ),
    )
