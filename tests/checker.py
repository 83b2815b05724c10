"""Checks the environment contract from outside: imports nothing of raycontrol, knows only what users were promised.

``violations(jobs)`` takes what ``probe.py`` wrote in one job, or in several that ran at the same time, and returns
a sentence for each broken rule. A rule is a generator of such sentences. ``EVERY_MODE`` holds for all jobs,
``BY_MODE`` adds what a mode promises, ``TOGETHER`` holds between jobs that run at once.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One job's documents, and what its spec asked for. ``slots`` and ``gpus`` have one entry per instance, in
    INDEX order; a share of a GPU counts as 1. ``spread``: every instance on a node of its own.

    ``node_env`` is the environment that `ray start` was given, ``worker_env`` what a plain task of that Ray sees;
    with both the checker knows what Ray adds. ``env`` is the spec's, ``files`` some of its working directory's.
    """

    documents: Sequence[Document]
    slots: Sequence[int]
    gpus: Sequence[int]
    mode: str = "ddp"
    spread: bool = True
    name: str | None = None
    roles: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()
    node_env: Mapping[str, str] = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def instances(self) -> int:
        return len(self.slots)


def violations(jobs: Sequence[Job]) -> list[str]:
    """Every broken rule, one sentence each; none of two kinds twice. Empty when the contract holds."""
    found: list[str] = []
    for number, job in enumerate(jobs):
        label = f"job {number}" if len(jobs) > 1 else "job"
        incomplete = list(every_process_reports_once(job)) + list(every_name_is_there(job))
        # Without all documents and all names the other rules would only repeat that they are missing.
        broken = incomplete or [text for rule in rules(job.mode) for text in rule(job)]
        found += [f"{label}: {text}" for text in broken]
    if not found:
        found = [text for rule in TOGETHER for text in rule(jobs)]
    return list(dict.fromkeys(found))


def rules(mode: str) -> tuple[Rule, ...]:
    return (*EVERY_MODE, *BY_MODE[mode])


# -- names

EVERYWHERE = (
    "NODE_LIST",
    "NODE_NUM",
    "INDEX",
    "GPU_NUM",
    "GPU_NUM_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RAYCONTROL_JOB_ID",
    "RAYCONTROL_JOB_NAME",
    "RAYCONTROL_ATTEMPT",
    "RAYCONTROL_ATTEMPT_ID",
    "RAYCONTROL_GROUP",
    "RAYCONTROL_ROLE",
    "RAYCONTROL_INSTANCE",
    "RAYCONTROL_SLOTS",
    "RAYCONTROL_NP",
    "RAYCONTROL_NODE_NAMES",
    "RAYCONTROL_CODE_DIR",
    "RAYCONTROL_OUTPUT_DIR",
    "CUDA_VISIBLE_DEVICES",
)
NAMES_BY_MODE = {
    "ddp": (
        "WORLD_SIZE",
        "RANK",
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    ),
    "mpi": (
        "NODE_IP_SLOT_LIST",
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
        "HYDRA_HOST_FILE",
    ),
}
SINGLE_ROLE = {"ddp": "master", "mpi": "launcher"}

# What Ray gives a worker and a job may have as well, because raycontrol sets it too.
SET_AFRESH = {"PYTHONUNBUFFERED"}


# -- one job, every mode


def every_process_reports_once(job: Job) -> Iterator[str]:
    expected = {(index, local) for index, slots in enumerate(job.slots) for local in range(slots)}
    counts = Counter((document["index"], document["local"]) for document in job.documents)
    for process in sorted(expected - counts.keys()):
        yield f"process {process[1]} of INDEX {process[0]} has not reported"
    for process in sorted(counts.keys() - expected):
        yield f"process {process[1]} of INDEX {process[0]} should not exist"
    for process in sorted(process for process, count in counts.items() if count > 1):
        yield f"process {process[1]} of INDEX {process[0]} reported {counts[process]} times"


def every_name_is_there(job: Job) -> Iterator[str]:
    for document in job.documents:
        for name in (*EVERYWHERE, *NAMES_BY_MODE[job.mode]):
            if name not in document["env"]:
                yield f"{who(document)}: {name} is not set"


def all_agree(job: Job) -> Iterator[str]:
    shared = (
        "NODE_LIST",
        "NODE_NUM",
        "GPU_NUM",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RAYCONTROL_JOB_ID",
        "RAYCONTROL_JOB_NAME",
        "RAYCONTROL_ATTEMPT",
        "RAYCONTROL_NP",
        "RAYCONTROL_NODE_NAMES",
    )
    for name in shared:
        values = sorted({document["env"][name] for document in job.documents})
        if len(values) > 1:
            yield f"{name} differs between processes: {' | '.join(values)}"


def node_list_names_every_instance(job: Job) -> Iterator[str]:
    for document in job.documents:
        env = document["env"]
        entries = node_list(env)
        if len(entries) != job.instances:
            yield f"{who(document)}: NODE_LIST has {len(entries)} entries for {job.instances} instances"
            continue
        yield from unequal(document, "NODE_NUM", job.instances)
        for ip, _ in entries:
            if not is_ip(ip):
                yield f"{who(document)}: NODE_LIST names {ip!r}, which is no IP address"
        ip, gpus = entries[document["index"]]
        if ip not in document["addresses"]:
            yield f"{who(document)}: NODE_LIST[INDEX] is {ip}, this host has {', '.join(document['addresses'])}"
        if is_loopback(ip) and job.instances > 1 and job.spread:
            yield f"{who(document)}: NODE_LIST[INDEX] is {ip}, an address that no other host can reach"
        if gpus != env["GPU_NUM_PER_NODE"]:
            yield f"{who(document)}: NODE_LIST[INDEX] has {gpus} GPUs, GPU_NUM_PER_NODE is {env['GPU_NUM_PER_NODE']}"
        if str(sum(int(count) for _, count in entries)) != env["GPU_NUM"]:
            yield f"{who(document)}: the GPUs of NODE_LIST {env['NODE_LIST']} do not add up to GPU_NUM {env['GPU_NUM']}"


def gpus_are_those_asked_for(job: Job) -> Iterator[str]:
    for document in job.documents:
        gpus = job.gpus[document["index"]]
        yield from unequal(document, "GPU_NUM_PER_NODE", gpus)
        yield from unequal(document, "GPU_NUM", sum(job.gpus))
        visible = devices(document["env"])
        if len(visible) != gpus or len(set(visible)) != gpus:
            value = document["env"]["CUDA_VISIBLE_DEVICES"]
            yield f"{who(document)}: CUDA_VISIBLE_DEVICES is {value!r}, the instance has {gpus} GPUs"


def master_is_index_0_and_answers(job: Job) -> Iterator[str]:
    for document in job.documents:
        env = document["env"]
        first = node_list(env)[0][0]
        if env["MASTER_ADDR"] != first:
            yield f"{who(document)}: MASTER_ADDR is {env['MASTER_ADDR']}, INDEX 0 is {first}"
        if not (env["MASTER_PORT"].isdecimal() and 0 < int(env["MASTER_PORT"]) < 65536):
            yield f"{who(document)}: MASTER_PORT is {env['MASTER_PORT']!r}"
        if "0-0" not in document["reached"]:
            yield f"{who(document)}: could not connect to the master"
        if document["index"] == 0 and document["local"] == 0 and not document["bound"]:
            yield f"{who(document)}: could not listen on MASTER_PORT"


def all_live_at_once_and_reach_each_other(job: Job) -> Iterator[str]:
    everybody = {f"{index}-{local}" for index, slots in enumerate(job.slots) for local in range(slots)}
    for document in job.documents:
        for what, verb in (("seen", "see"), ("reached", "reach")):
            missed = everybody - set(document[what])
            if missed:
                yield f"{who(document)}: did not {verb} {', '.join(sorted(missed))}"


def slots_add_up(job: Job) -> Iterator[str]:
    for document in job.documents:
        yield from unequal(document, "RAYCONTROL_SLOTS", job.slots[document["index"]])
        yield from unequal(document, "RAYCONTROL_NP", sum(job.slots))


def instances_have_names(job: Job) -> Iterator[str]:
    names: dict[int, str] = {}
    for document in job.documents:
        env = document["env"]
        index, instance, group = document["index"], env["RAYCONTROL_INSTANCE"], env["RAYCONTROL_GROUP"]
        yield from unequal(document, "INDEX", index)
        place = instance[len(group) + 1 :]
        if not instance.startswith(f"{group}-") or not place.isdecimal():
            yield f"{who(document)}: RAYCONTROL_INSTANCE is {instance!r} in group {group!r}"
        if names.setdefault(index, instance) != instance:
            yield f"{who(document)}: RAYCONTROL_INSTANCE is {instance!r} and {names[index]!r}"
        if job.name is not None:
            yield from unequal(document, "RAYCONTROL_JOB_NAME", job.name)
        if len(env["RAYCONTROL_NODE_NAMES"].split(",")) != job.instances:
            yield f"{who(document)}: RAYCONTROL_NODE_NAMES is {env['RAYCONTROL_NODE_NAMES']!r}"
        if not env["RAYCONTROL_ATTEMPT"].isdecimal():
            yield f"{who(document)}: RAYCONTROL_ATTEMPT is {env['RAYCONTROL_ATTEMPT']!r}"
    if len(set(names.values())) != len(names):
        yield f"instances share a name: {', '.join(names[index] for index in sorted(names))}"


def numbers_rise_within_a_group(job: Job) -> Iterator[str]:
    last: dict[str, int] = {}
    for document in firsts(job):
        group, _, place = document["env"]["RAYCONTROL_INSTANCE"].rpartition("-")
        if place.isdecimal() and int(place) != last.get(group, -1) + 1:
            yield f"{who(document)}: instance {group}-{place} follows {group}-{last.get(group, -1)}"
        last[group] = int(place) if place.isdecimal() else -1


def roles_are_those_of_the_mode(job: Job) -> Iterator[str]:
    roles = job.roles or [SINGLE_ROLE[job.mode], *["worker"] * (job.instances - 1)]
    for document in job.documents:
        yield from unequal(document, "RAYCONTROL_ROLE", roles[document["index"]])


def spread_over_nodes(job: Job) -> Iterator[str]:
    hosts = [document["hostname"] for document in firsts(job)]
    if job.spread and len(set(hosts)) != len(hosts):
        yield f"two instances share a node: {', '.join(hosts)}"


def nothing_of_ray_is_left(job: Job) -> Iterator[str]:
    for document in job.documents:
        for name, value in sorted(document["env"].items()):
            if name in (*job.env, *NAMES_BY_MODE[job.mode], *EVERYWHERE, *SET_AFRESH):
                continue
            added = name not in job.node_env and job.worker_env.get(name) == value
            if added or name.startswith("RAY_") or "ray.util" in value or "/ray/core/" in value:
                yield f"{who(document)}: {name}={value} comes from Ray"


def the_nodes_and_the_users_environment_arrive(job: Job) -> Iterator[str]:
    for document in job.documents:
        for name, value in sorted(job.env.items()):
            yield from unequal(document, name, value)
        for name, value in sorted(job.node_env.items()):
            ray_or_ours = name.startswith("RAY_") or name in EVERYWHERE or name in NAMES_BY_MODE[job.mode]
            if name != "PATH" and name not in job.env and not ray_or_ours:
                yield from unequal(document, name, value)
        missing = [
            part
            for part in job.node_env.get("PATH", "").split(":")
            if part and "PATH" not in job.env and part not in document["env"].get("PATH", "").split(":")
        ]
        if missing:
            yield f"{who(document)}: PATH lacks the node's {', '.join(missing)}"


def process_attributes_are_fresh(job: Job) -> Iterator[str]:
    fresh = {
        "nice": 0,
        "oom_score_adj": 0,
        "blocked_signals": [],
        "descriptors": [],
        "stdin": "/dev/null",
        "umask": 0o022,
    }
    for document in job.documents:
        for name, value in fresh.items():
            if document[name] != value:
                yield f"{who(document)}: {name} is {document[name]!r}, not {value!r}"


def folders_are_one_per_node_and_one_per_instance(job: Job) -> Iterator[str]:
    code: dict[str, str] = {}
    outputs: dict[tuple[str, str], int] = {}
    for document in job.documents:
        env, host = document["env"], document["hostname"]
        if document["cwd"] != env["RAYCONTROL_CODE_DIR"]:
            yield f"{who(document)}: runs in {document['cwd']}, RAYCONTROL_CODE_DIR is {env['RAYCONTROL_CODE_DIR']}"
        if code.setdefault(host, document["cwd"]) != document["cwd"]:
            yield f"{who(document)}: runs in {document['cwd']}, another of the job on this node in {code[host]}"
        folder = (host, env["RAYCONTROL_OUTPUT_DIR"])
        if outputs.setdefault(folder, document["index"]) != document["index"]:
            yield f"{who(document)}: shares RAYCONTROL_OUTPUT_DIR {folder[1]} with INDEX {outputs[folder]}"
        if not document["writable"]:
            yield f"{who(document)}: cannot write in {document['cwd']}"
        missing = set(job.files) - set(document["files"])
        if missing:
            yield f"{who(document)}: {', '.join(sorted(missing))} not in {document['cwd']}"


# -- ddp


def rank_is_index_and_world_size_counts_instances(job: Job) -> Iterator[str]:
    for document in job.documents:
        yield from unequal(document, "RANK", document["index"])
        yield from unequal(document, "WORLD_SIZE", job.instances)


def a_bare_torchrun_finds_its_flags(job: Job) -> Iterator[str]:
    for document in job.documents:
        env = document["env"]
        yield from unequal(document, "PET_NNODES", job.instances)
        yield from unequal(document, "PET_NPROC_PER_NODE", job.slots[document["index"]])
        yield from unequal(document, "PET_NODE_RANK", document["index"])
        yield from unequal(document, "PET_MASTER_ADDR", env["MASTER_ADDR"])
        yield from unequal(document, "PET_MASTER_PORT", env["MASTER_PORT"])


# -- mpi


def hosts_and_slots_are_those_of_the_instances(job: Job) -> Iterator[str]:
    """The list and the hostfiles name each node once, in INDEX order, with the slots of its instances."""
    for document in job.documents:
        slots: dict[str, int] = {}
        for (ip, _), number in zip(node_list(document["env"]), job.slots, strict=True):
            slots[ip] = slots.get(ip, 0) + number
        yield from unequal(
            document, "NODE_IP_SLOT_LIST", ",".join(f"{ip}:{number}" for ip, number in slots.items())
        )
        lines = {"OMPI": "{} slots={}", "PRTE": "{} slots={}", "HYDRA": "{}:{}"}
        for name, found in document["hostfiles"].items():
            wanted = [lines[name.split("_")[0]].format(ip, number) for ip, number in slots.items()]
            if found != wanted:
                yield f"{who(document)}: {name} names a file with {found}, not {wanted}"
        if len(document["hostfiles"]) != 3:
            yield f"{who(document)}: has {len(document['hostfiles'])} hostfiles"


def there_is_an_ssh_of_the_jobs_own(job: Job) -> Iterator[str]:
    for document in job.documents:
        first = document["env"]["PATH"].split(":")[0]
        if not first.endswith(f"/{document['env']['RAYCONTROL_INSTANCE']}/bin"):
            yield f"{who(document)}: PATH begins with {first}"


# -- jobs that run at once


def ports_differ(jobs: Sequence[Job]) -> Iterator[str]:
    for (a, one), (b, other) in combinations(enumerate(jobs), 2):
        first, second = (job.documents[0]["env"] for job in (one, other))
        same_host = first["MASTER_ADDR"] == second["MASTER_ADDR"]
        if same_host and first["MASTER_PORT"] == second["MASTER_PORT"]:
            yield f"jobs {a} and {b} have the same MASTER_PORT {first['MASTER_PORT']}"


def ids_differ(jobs: Sequence[Job]) -> Iterator[str]:
    for (a, one), (b, other) in combinations(enumerate(jobs), 2):
        for name in ("RAYCONTROL_JOB_ID", "RAYCONTROL_ATTEMPT_ID"):
            shared = values(one, name) & values(other, name)
            if shared:
                yield f"jobs {a} and {b} share {name} {', '.join(sorted(shared))}"


def folders_differ(jobs: Sequence[Job]) -> Iterator[str]:
    for (a, one), (b, other) in combinations(enumerate(jobs), 2):
        for name in ("RAYCONTROL_CODE_DIR", "RAYCONTROL_OUTPUT_DIR"):
            shared = on_hosts(one, name) & on_hosts(other, name)
            for host, folder in sorted(shared):
                yield f"jobs {a} and {b} share {name} {folder} on {host}"


def no_gpu_is_given_twice(jobs: Sequence[Job]) -> Iterator[str]:
    """Whole GPUs only: jobs that ask for shares of one may meet on it."""
    taken: dict[tuple[str, str], str] = {}
    for number, job in enumerate(jobs):
        for document in firsts(job):
            instance = f"INDEX {document['index']} of job {number}"
            for device in devices(document["env"]):
                other = taken.setdefault((document["hostname"], device), instance)
                if other != instance:
                    yield f"GPU {device} of {document['hostname']} was given to {other} and {instance}"


def they_ran_at_once(jobs: Sequence[Job]) -> Iterator[str]:
    started = max(document["started"] for job in jobs for document in job.documents)
    ended = min(document["ended"] for job in jobs for document in job.documents)
    if started >= ended:
        yield f"the jobs did not run at the same time: the last began {started - ended:.1f} s after the first ended"


Rule = Callable[[Job], Iterable[str]]

EVERY_MODE: tuple[Rule, ...] = (
    all_agree,
    node_list_names_every_instance,
    gpus_are_those_asked_for,
    master_is_index_0_and_answers,
    all_live_at_once_and_reach_each_other,
    slots_add_up,
    instances_have_names,
    numbers_rise_within_a_group,
    roles_are_those_of_the_mode,
    spread_over_nodes,
    nothing_of_ray_is_left,
    the_nodes_and_the_users_environment_arrive,
    process_attributes_are_fresh,
    folders_are_one_per_node_and_one_per_instance,
)
BY_MODE: dict[str, tuple[Rule, ...]] = {
    "ddp": (rank_is_index_and_world_size_counts_instances, a_bare_torchrun_finds_its_flags),
    "mpi": (hosts_and_slots_are_those_of_the_instances, there_is_an_ssh_of_the_jobs_own),
}
TOGETHER: tuple[Callable[[Sequence[Job]], Iterable[str]], ...] = (
    ports_differ,
    ids_differ,
    folders_differ,
    no_gpu_is_given_twice,
    they_ran_at_once,
)


# -- reading documents


def who(document: Document) -> str:
    return f"INDEX {document['index']}, process {document['local']}"


def unequal(document: Document, name: str, value: object) -> Iterator[str]:
    found = document["env"].get(name)
    if found != str(value):
        yield f"{who(document)}: {name} is {found!r}, not {str(value)!r}"


def node_list(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """``ip:gpus,…``; an IPv6 address stands in brackets."""
    entries = [entry.rpartition(":") for entry in env["NODE_LIST"].split(",")]
    return [(ip.strip("[]"), gpus) for ip, _, gpus in entries]


def devices(env: Mapping[str, str]) -> list[str]:
    return [device for device in env["CUDA_VISIBLE_DEVICES"].split(",") if device not in ("", "-1")]


def firsts(job: Job) -> list[Document]:
    """The first process of each instance, in INDEX order."""
    return sorted((one for one in job.documents if one["local"] == 0), key=lambda one: int(one["index"]))


def values(job: Job, name: str) -> set[str]:
    return {document["env"][name] for document in job.documents}


def on_hosts(job: Job, name: str) -> set[tuple[str, str]]:
    return {(document["hostname"], document["env"][name]) for document in job.documents}


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(text: str) -> bool:
    return is_ip(text) and ipaddress.ip_address(text).is_loopback
