"""What every mode's plan gets on top: the network, RDMA, shares of a GPU; and what every mode's failure may mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raycontrol import rdma
from raycontrol.backends import places
from raycontrol.backends.contract import Environment
from raycontrol.plan import SECRET, Cause, Facts, Plan
from raycontrol.rdma import Value
from raycontrol.spec import JobSpec, Member, Mode, Placement, members

TORCH_WITH_FRACTION = (2, 10)
"""The first PyTorch whose allocator takes a fraction from the environment (https://github.com/pytorch/pytorch/pull/161035)."""
GLOO = "NCCL refuses that; use gloo (`init_process_group('gloo')`, `horovodrun --gloo`), or whole GPUs"
SYMPTOMS = (
    (re.compile(r"Duplicate GPU detected"), f"two ranks of the job were on one GPU: {GLOO}"),
    (
        re.compile(r"connect \[127\.0\.\d+\.\d+\]:\d+: Connection refused"),
        "Gloo asked a host for the address of its own name and got one of 127.0.0.0/8, where no other host gets: name the "
        "nodes' real addresses in /etc/hosts, or use the Horovod that scripts/build-horovod makes, which does not ask",
    ),
)
"""What any mode's program may have run into, as its log has it, and what to do."""
ORIGINS = re.compile(r"(NCCL|GLOO|TP|TCCL)_|CUDA_MPS_|\w*_if_include$|HYDRA_IFACE$|HOROVOD_GLOO_IFACE$")
"""Variables about network and GPUs, of which a plan says where they come from."""


def completed(plan: Plan, spec: JobSpec, facts: tuple[Facts, ...]) -> Plan:
    """Return a mode's plan with what does not depend on the mode. What the mode or the user has set stays as it is."""
    gang = members(spec)
    decision = rdma.decide(spec, gang, facts)
    network = rdma.variables(gang, facts, decision)
    shared = tuple(_shared_gpus(spec, gang, facts))
    known = all(fact.hardware is not None for fact in facts)
    secret: Environment = dict.fromkeys(spec.secret_env, SECRET)
    origins = dict.fromkeys(spec.secret_env, "secret_env")
    found = {
        member.name: {**_shell(fact), **_told(network[member.name]), **_share(member, fact)}
        for member, fact in zip(gang, facts, strict=True)
    }
    return replace(
        plan,
        environment={
            name: {**_texts(found[name]), **variables, **secret}
            for name, variables in plan.environment.items()
        },
        origins={
            member.name: {**_origins(found[member.name], plan.environment[member.name], member), **origins}
            for member in gang
        },
        rdma=decision,
        warnings=(*plan.warnings, *shared),
        notes=(*rdma.remarks(facts, decision), *shared, *_gpu_problems(gang, facts), *_without_shell(facts))
        if known
        else (),
        secret_env=tuple(spec.secret_env),
        mounts=places.mounts(spec, facts),
    )


def advised(cause: Cause | None, lines: Sequence[str]) -> Cause | None:
    """Return what a mode has read in the last lines, with advice on what any mode's program may have run into."""
    if cause is not None and cause.advice is not None:
        return cause
    text = "\n".join(lines)
    found = next((advice for symptom, advice in SYMPTOMS if symptom.search(text)), None)
    return cause if found is None else replace(cause or Cause(), advice=found)


class Told(NamedTuple):
    """A variable's value, and where it comes from in words."""

    text: str
    origin: str


def _told(values: Mapping[str, Value]) -> dict[str, Told]:
    return {name: Told(value.text, value.origin) for name, value in values.items()}


def _shell(fact: Facts) -> dict[str, Told]:
    return {name: Told(text, f"the shell of {fact.node_name}") for name, text in fact.shell_env.items()}


def _without_shell(facts: Sequence[Facts]) -> Iterator[str]:
    for fact in facts:
        if fact.shell_trouble is not None:
            yield f"{fact.instance} is without the environment of the shell of {fact.node_name}: {fact.shell_trouble}"


def _texts(values: Mapping[str, Told]) -> Environment:
    return {name: value.text for name, value in values.items()}


def _origins(
    values: Mapping[str, Told], variables: Mapping[str, str | None], member: Member
) -> dict[str, str]:
    """Say where the variables come from that are in the environment in the end."""
    origins = {name: value.origin for name, value in values.items()}
    for name, text in variables.items():
        if text is not None and (name in origins or ORIGINS.match(name)):
            origins[name] = "the job's env" if name in member.env else f"mode {variables['RAYCONTROL_MODE']}"
    return {name: origin for name, origin in origins.items() if variables.get(name, "") is not None}


# Shares of a GPU.


def _share(member: Member, fact: Facts) -> dict[str, Told]:
    """Return what frameworks understand to stay within a fraction of a GPU (docs/gpus.md says what each enforces)."""
    gpu = member.resources.gpu
    if not 0 < gpu < 1:
        return {}
    share = gpu / member.slots
    texts = {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3g}",
        **_allocator(share, member, fact),
        **_mps(share, fact),
    }
    return {name: Told(text, f"a share of {gpu:g} GPU") for name, text in texts.items()}


def _allocator(share: float, member: Member, fact: Facts) -> dict[str, str]:
    """PyTorch refuses options that it does not know, so that only a version that has this one is given it.

    It would not look at the older name of the variable any more, which many jobs set.
    """
    if member.env.get("PYTORCH_CUDA_ALLOC_CONF") is not None:
        return {}
    installed = fact.hardware.torch if fact.hardware is not None else None
    version = re.match(r"(\d+)\.(\d+)", installed or "")
    if version is None or (int(version[1]), int(version[2])) < TORCH_WITH_FRACTION:
        return {}
    return {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{share:.3g}"}


def _mps(share: float, fact: Facts) -> dict[str, str]:
    """Limits of CUDA's Multi-Process Service, where its daemon runs; device 0 is the only one that is visible."""
    hardware = fact.hardware
    if hardware is None or not hardware.mps:
        return {}
    limits = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * share:.3g}"}
    if hardware.gpu_memory:
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={int(share * hardware.gpu_memory) >> 20}M"
    return limits


# What is wrong with GPUs.


def _gpu_problems(gang: Sequence[Member], facts: Sequence[Facts]) -> Iterator[str]:
    problems: dict[str, list[str]] = {}
    for member, fact in zip(gang, facts, strict=True):
        if member.resources.gpu > 0 and fact.hardware is not None and fact.hardware.gpu_problem is not None:
            problems.setdefault(fact.hardware.gpu_problem, []).append(fact.node_name)
    for problem, nodes in problems.items():
        yield f"GPUs on {rdma.some(list(dict.fromkeys(nodes)))}: {problem}"


# Ranks that share a GPU.


def _shared_gpus(spec: JobSpec, gang: Sequence[Member], facts: Sequence[Facts]) -> Iterator[str]:
    """Warn when two ranks would share a GPU."""
    if spec.mode is Mode.PS and any(member.role == "ps" for member in gang):
        return  # parameter servers and their workers do not talk through NCCL
    for member in gang:
        gpus = max(1, int(member.resources.gpu))
        if member.resources.gpu > 0 and member.slots > gpus:
            yield f"the {member.slots} ranks of {member.name} share {gpus} GPU{'s' if gpus > 1 else ''}: {GLOO}"
            return
    sharers = _sharers(spec, gang, facts)
    if sharers:
        yield f"ranks of {' and '.join(sharers)} {_share_verb(facts)} a GPU: {GLOO}"


def _share_verb(facts: Sequence[Facts]) -> str:
    return "share" if all(fact.hardware is not None for fact in facts) else "may share"


def _sharers(spec: JobSpec, gang: Sequence[Member], facts: Sequence[Facts]) -> tuple[str, ...]:
    """Return two instances with a GPU in common: seen where facts are known, else possible by the placement."""
    if any(fact.hardware is None for fact in facts):
        shares = sorted((m for m in gang if 0 < m.resources.gpu < 1), key=lambda m: m.resources.gpu)[:2]
        may = (
            spec.placement is Placement.PACK
            and len(shares) == 2
            and sum(m.resources.gpu for m in shares) <= 1
        )
        return (shares[0].name, shares[1].name) if may else ()
    holders: dict[tuple[str, str], str] = {}
    for fact in facts:
        for gpu in fact.gpus:
            other = holders.setdefault((fact.ip, gpu), fact.instance)
            if other != fact.instance:
                return other, fact.instance
    return ()
