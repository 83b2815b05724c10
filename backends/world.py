"""What the modes mpi and horovod have in common: hosts and slots, the variables of every MPI, the stand-ins.

An MPI host is a node. Instances that share a node (``placement: pack``) are one host: its ranks run in the one with the
lowest INDEX, which sees the GPUs of all of them. (Open MPI refuses a host that is named twice.)
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycontrol.backends.contract import Environment, bracketed
from raycontrol.plan import Cause, Facts
from raycontrol.spec import LAUNCHERS, RESERVED, JobSpec, Member, Placement, RunOn

AGENT = "raycontrol-rsh"
"""What launchers call instead of ssh. A bare name: Open MPI's daemons look for the launcher's agent on their own nodes."""
LOST_PATH = (
    f"Open MPI does not find {AGENT}: the start command has replaced PATH (a login shell, `su` and `env -i` do). Keep the "
    "PATH that the command was given, or put its first folder back in front"
)
BROKEN = "broken"
"""The folder where the agent (``standin``) puts down which of its connections ended abnormally, one file each."""
ADVICE = "raycontrol: "
"""How lines begin that a stand-in wrote."""


@dataclass(frozen=True)
class Host:
    """A node as MPI sees it: ``instances`` in the order of INDEX, ``slots`` of all of them together."""

    ip: str
    slots: int
    instances: tuple[str, ...]
    gpus: tuple[str, ...]


def hosts_of(gang: Sequence[Member], facts: Sequence[Facts]) -> tuple[Host, ...]:
    """Return every node once, in the order of its first instance."""
    found: dict[str, Host] = {}
    for member, fact in zip(gang, facts, strict=True):
        host = found.get(fact.ip, Host(fact.ip, 0, (), ()))
        found[fact.ip] = Host(
            ip=fact.ip,
            slots=host.slots + member.slots,
            instances=(*host.instances, member.name),
            gpus=tuple(dict.fromkeys((*host.gpus, *fact.gpus))),
        )
    return tuple(found.values())


def variables(hosts: Sequence[Host], facts: Sequence[Facts]) -> dict[str, dict[str, str]]:
    """Return, by instance, the variables that the user may replace, and ``NODE_IP_SLOT_LIST``.

    Open MPI 5: https://docs.open-mpi.org/en/v5.0.x/launching-apps/ssh.html and PRRTE's own parameters; Open MPI 4: those
    that begin with ``OMPI_MCA_orte`` or ``_plm``; MPICH: ``HYDRA_*`` (https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md);
    Intel MPI: ``I_MPI_*``.
    """
    shared = {**_shared(hosts), **_interfaces(facts)}  # long in a large gang, and made once
    return {fact.instance: {**shared, **_own(fact)} for fact in facts}


def _shared(hosts: Sequence[Host]) -> dict[str, str]:
    return {
        "NODE_IP_SLOT_LIST": ",".join(f"{bracketed(host.ip)}:{host.slots}" for host in hosts),
        "PRTE_MCA_plm_ssh_agent": AGENT,
        "OMPI_MCA_plm_rsh_agent": AGENT,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": AGENT,
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": AGENT,
        # Two jobs on a node would share its first cores, and more slots than cores would be refused.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "I_MPI_PIN": "off",
        # Open MPI 5's collective component `han` hangs or crashes in large reductions over unequal nodes.
        "OMPI_MCA_coll_han_priority": "0",
        # A daemon that left its ssh session could not be seen to fail, nor be ended with it.
        "OMPI_MCA_orte_leave_session_attached": "1",
        "PRTE_MCA_prte_leave_session_attached": "1",
    }


def _own(fact: Facts) -> dict[str, str]:
    found = {
        "PRTE_MCA_prte_default_hostfile": f"{fact.private_dir}/hostfile",
        "OMPI_MCA_orte_default_hostfile": f"{fact.private_dir}/hostfile",
        "HYDRA_HOST_FILE": f"{fact.private_dir}/hostfile.hydra",
        "I_MPI_HYDRA_HOST_FILE": f"{fact.private_dir}/hostfile.hydra",
    }
    if fact.root:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            found |= {name: "1", f"{name}_CONFIRM": "1"}
    return found


def _interfaces(facts: Sequence[Facts]) -> dict[str, str]:
    """Return the network to use: the launcher passes its own value on, so it has to be right on every node."""
    interfaces = {fact.interface for fact in facts}
    networks = {fact.network for fact in facts}
    interface = facts[0].interface if len(interfaces) == 1 else None
    chosen = interface or (facts[0].network if len(networks) == 1 else None)
    found: dict[str, str] = {}
    if chosen is not None:
        names = ("prte_if_include", "oob_tcp_if_include", "btl_tcp_if_include", "ptl_tcp_if_include")
        prefixes = ("PRTE_MCA", "OMPI_MCA", "OMPI_MCA", "PMIX_MCA")
        found = {f"{prefix}_{name}": chosen for prefix, name in zip(prefixes, names, strict=True)}
    if any(":" in fact.ip for fact in facts):
        # PMIx speaks IPv4 only, and only within a node.
        found["PMIX_MCA_ptl_tcp_if_include"] = "lo"
    if interface is not None:
        found |= {"HYDRA_IFACE": interface, "HOROVOD_GLOO_IFACE": interface}
    return found


def with_shared_gpus(environment: Mapping[str, Environment], hosts: Sequence[Host]) -> dict[str, Environment]:
    """Let the first instance of every host see the GPUs of all its instances: all the host's ranks run there."""
    lenders = {host.instances[0]: ",".join(host.gpus) for host in hosts if len(host.instances) > 1}
    return {
        name: {**variables, "CUDA_VISIBLE_DEVICES": lenders[name]} if name in lenders else variables
        for name, variables in environment.items()
    }


def files(
    hosts: Sequence[Host], facts: Sequence[Facts], environment: Mapping[str, Environment], run_on: RunOn
) -> dict[str, dict[str, str]]:
    """Return hostfiles and stand-ins, by path below the private folder."""
    hidden = sorted(_hidden(environment))
    hostfile = "".join(f"{host.ip} slots={host.slots}\n" for host in hosts)
    hydra = "".join(f"{bracketed(host.ip)}:{host.slots}\n" for host in hosts)
    return {
        fact.instance: {
            "hostfile": hostfile,
            "hostfile.hydra": hydra,
            "standin.json": json.dumps(
                {
                    "instance": fact.instance,
                    "launcher": facts[0].instance,
                    "run_on": run_on,
                    "hidden": hidden,
                },
                indent=1,
            ),
            **{f"bin/{name}": _stand_in(name, fact) for name in LAUNCHERS},
            f"bin/{AGENT}": _stand_in("rsh-agent", fact),
        }
        for fact in facts
    }


def _hidden(environment: Mapping[str, Environment]) -> set[str]:
    """Return the names that each instance sets for itself: a launcher must not carry its own values to the others.

    Those of the contract, and those that differ between instances. (The stand-ins see to PATH and to what looks secret.)
    """
    names = {name for variables in environment.values() for name in variables}
    differing = {name for name in names if len({item.get(name) for item in environment.values()}) > 1}
    return {name for name in names if name in differing or name in RESERVED or name.startswith("RAYCONTROL_")}


def _stand_in(name: str, fact: Facts) -> str:
    program = f"{shlex.quote(fact.python)} -I -S {shlex.quote(fact.package_dir + '/standin.py')}"
    return f'#!/bin/sh\nexec {program} {shlex.quote(fact.private_dir)} {name} "$@"\n'


def warnings(spec: JobSpec) -> list[str]:
    """Say what ``placement: pack`` means to MPI."""
    if spec.placement is not Placement.PACK:
        return []
    return [
        "instances that come to share a node are one MPI host: its ranks run in the instance with the lowest INDEX, "
        "which sees the GPUs of all of them"
    ]


# What launchers say.

EXIT, SIGNAL, ABORT = "exit", "signal", "abort"
# Not in here is Hydra's BAD TERMINATION. It mixes the status of the rank that failed with those of the ranks that Hydra
# killed after it, and so shows exit code 3 as signal 9 and SIGINT as SIGSEGV.
_REPORTS = (
    # Open MPI 5 (prterun) and 4 (mpirun)
    (EXIT, r"Process name: \[(?:prterun-[^\]]*|\[\d+,\d+\]),(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    (SIGNAL, r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited\s+on\s+signal (?P<code>\d+)"),
    (
        ABORT,
        r"MPI_ABORT was invoked on .*\s+Proc: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Errorcode: (?P<code>-?\d+)",
    ),
    (
        ABORT,
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD\s+with errorcode (?P<code>-?\d+)",
    ),
    # MPICH, Intel MPI
    (ABORT, r"Abort\((?P<code>-?\d+)\) on node (?P<rank>\d+)\b"),
    # horovodrun
    (EXIT, r"Process name: (?P<rank>\d+)\s+Exit code: (?P<code>-?\d+)"),
)
_PATTERNS = tuple((how, re.compile(pattern)) for how, pattern in _REPORTS)
_NO_ADVICE = re.compile(r"\S+ waits for .* to call it too$")


def explain(lines: Sequence[str]) -> Cause | None:
    """Read what mpirun, prterun or horovodrun say of the rank that failed first, and what a stand-in advised."""
    said = (line.removeprefix(ADVICE) for line in reversed(lines) if line.startswith(ADVICE))
    advice = next((text for text in said if not _NO_ADVICE.match(text)), None)
    text = "\n".join(lines)
    if advice is None and AGENT in text and "could not be found" in text:
        advice = LOST_PATH
    failed = _first_failed(text)
    if failed is None:
        return None if advice is None else Cause(advice=advice)
    rank, code = failed
    return Cause(rank=rank, exit_code=code, advice=advice)


def _first_failed(text: str) -> tuple[int, int] | None:
    """Return rank and code of the last report; of an abort, with all that it brings about, the first."""
    found = sorted(
        (match.start(), how, int(match["rank"]), int(match["code"]))
        for how, pattern in _PATTERNS
        for match in pattern.finditer(text)
    )
    told: tuple[str, int, int] | None = None
    for _, how, rank, code in found:
        if told is None or told[0] != ABORT or how == EXIT:
            told = (how, rank, -code if how == SIGNAL else code)
    return None if told is None else told[1:]
