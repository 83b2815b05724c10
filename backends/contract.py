"""The part of the environment contract that every mode shares (docs/environment.md).

The names ``NODE_LIST`` … ``MASTER_PORT`` are those of Tencent TI-ONE's task-based modeling; the names that begin with
``RAYCONTROL_`` are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from raycontrol.arrayspec import indices_of
from raycontrol.plan import Alive, Brief, Facts, PlannedRun, Stage
from raycontrol.spec import LAUNCHERS, JobSpec, Member, Mode, members

Environment = dict[str, str | None]
Files = dict[str, dict[str, str]]
"""Texts of every instance, by path below its private folder."""

START_LIMIT_S = 60.0
NETWORK_LIMIT_S = 30.0
GPU_NAMES = re.compile(r"\$\{?GPU_NUM(_PER_NODE)?\b")
OURS = re.compile(r"\$\{?(GPU_NUM|NODE_|MASTER_|INDEX|RANK|WORLD_SIZE|RAYCONTROL_)\w*\}?")
SHELL = re.compile(r"(^|/)(ba|da|z|k|)sh$")
WORLD_LAUNCHER = re.compile(rf"(?:^|[\s;&|(/])({'|'.join(map(re.escape, LAUNCHERS))})(?=\s|$)")
"""A program that starts ranks on all hosts, called by name or path."""


def environments(
    spec: JobSpec, brief: Brief, facts: Sequence[Facts], own: Mapping[str, Mapping[str, str]]
) -> dict[str, Environment]:
    """Return every instance's environment: defaults, then the job's and group's ``env``, then the reserved names.

    ``own[instance]`` holds the mode's own variables; those that are reserved names cannot have been set by the user,
    so that their place before ``env`` does no harm.
    """
    gang = members(spec)
    shared = _shared(spec, brief, gang, facts)
    reserved = {
        member.name: {**shared, **_reserved(member, fact)} for member, fact in zip(gang, facts, strict=True)
    }
    return {
        member.name: {**_defaults(facts), **own[member.name], **member.env, **reserved[member.name]}
        for member, fact in zip(gang, facts, strict=True)
    }


def bracketed(ip: str) -> str:
    """Return the address as it is written before a colon and a port."""
    return f"[{ip}]" if ":" in ip else ip


def _defaults(facts: Sequence[Facts]) -> Environment:
    """What the user may replace."""
    return {
        "MASTER_PORT": facts[0].ports["master"],
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def _shared(spec: JobSpec, brief: Brief, gang: Sequence[Member], facts: Sequence[Facts]) -> Environment:
    """Reserved names that say the same on every instance; made once, for they are long in a large gang."""
    return {
        "NODE_LIST": ",".join(f"{bracketed(item.ip)}:{len(item.gpus)}" for item in facts),
        "NODE_NUM": str(len(gang)),
        "GPU_NUM": str(sum(len(item.gpus) for item in facts)),
        "MASTER_ADDR": facts[0].ip,
        "RAYCONTROL_JOB_ID": brief.job_id,
        "RAYCONTROL_JOB_NAME": brief.job_name,
        "RAYCONTROL_MODE": spec.mode,
        "RAYCONTROL_ATTEMPT": str(brief.attempt),
        "RAYCONTROL_ATTEMPT_ID": brief.attempt_id,
        "RAYCONTROL_NP": str(sum(item.slots for item in gang)),
        "RAYCONTROL_NODE_NAMES": ",".join(item.node_name for item in facts),
        **_of_array(spec, brief),
    }


def _of_array(spec: JobSpec, brief: Brief) -> Environment:
    """What Slurm's SLURM_ARRAY_TASK_ID, _COUNT, _MIN and _MAX say."""
    if spec.array is None or brief.array_index is None:
        return {}
    indices = indices_of(spec.array.indices)
    return {
        "RAYCONTROL_ARRAY_INDEX": brief.array_index,
        "RAYCONTROL_ARRAY_COUNT": str(len(indices)),
        "RAYCONTROL_ARRAY_MIN": str(indices[0]),
        "RAYCONTROL_ARRAY_MAX": str(indices[-1]),
    }


def _reserved(member: Member, fact: Facts) -> Environment:
    return {
        "INDEX": str(member.index),
        "GPU_NUM_PER_NODE": str(len(fact.gpus)),
        "CUDA_VISIBLE_DEVICES": ",".join(fact.gpus),
        "RAYCONTROL_GROUP": member.group,
        "RAYCONTROL_ROLE": member.role,
        "RAYCONTROL_INSTANCE": member.name,
        "RAYCONTROL_SLOTS": str(member.slots),
        "RAYCONTROL_CODE_DIR": fact.code_dir,
        "RAYCONTROL_OUTPUT_DIR": fact.output_dir,
    }


# The parts of a plan that modes share.


def start(runs: Mapping[str, PlannedRun]) -> Stage:
    """Return the last stage: the start command of these instances runs."""
    return Stage(
        name="start",
        says=f"start command running on {len(runs)} instance{'s' if len(runs) > 1 else ''}",
        limit_s=START_LIMIT_S,
        runs={name: (run,) for name, run in runs.items()},
        until=tuple(Alive(name, run.name) for name, run in runs.items()),
    )


def start_command(spec: JobSpec, member: Member) -> PlannedRun:
    """Return the run of an instance's start command."""
    return PlannedRun("start", member.command, pipefail=spec.pipefail, cwd=spec.cwd)


def merged(*parts: Files) -> Files:
    """Return the files of all parts together."""
    names = {name: None for part in parts for name in part}
    return {
        name: {path: text for part in parts for path, text in part.get(name, {}).items()} for name in names
    }


def warnings(spec: JobSpec, gang: Sequence[Member]) -> list[str]:
    """Say where a start command counts on what it will not have: GPUs, a shell, the stand-ins of mode mpi."""
    found: list[str] = []
    for member in gang:
        by_shell = isinstance(member.command, str) or SHELL.search(member.command[0]) is not None
        words = member.command if isinstance(member.command, str) else " ".join(member.command)
        literal = OURS.search(words)
        if literal and not by_shell:
            found.append(
                f"{literal[0]} is not expanded in {member.name}'s command, because several words run without a shell: "
                "write the command as one quoted word"
            )
        elif member.resources.gpu == 0 and GPU_NAMES.search(words):
            found.append(
                f"{member.name} has no GPU, so GPU_NUM and GPU_NUM_PER_NODE are 0 in its command; "
                "use $RAYCONTROL_SLOTS (processes of this instance) or $RAYCONTROL_NP (of all), and `slots` to set them"
            )
        launcher = WORLD_LAUNCHER.search(words)
        if spec.mode is Mode.DDP and launcher and len(gang) > 1:
            mode = "horovod" if launcher[1] == "horovodrun" else "mpi"
            found.append(
                f"the command calls `{launcher[1]}`, but the mode is ddp: every instance would start a world of its own; "
                f"use mode {mode} (`--mode {mode}`)"
            )
        if found:
            return found
    return found
