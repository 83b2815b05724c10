"""Checks the environment contract from outside: imports nothing of raycontrol, knows only what users were promised.

``violations(jobs)`` takes what ``probe.py`` (mode ray: ``probe_ray.py``) wrote in one job, or in several that ran at
the same time, and returns a sentence for each broken rule. A rule is a generator of such sentences. ``EVERY_MODE``
holds for all jobs, ``BY_MODE`` adds what a mode promises, ``TOGETHER`` holds between jobs that run at once.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One job's documents, and what its spec asked for. ``slots`` and ``gpus`` have one entry per instance, in
    INDEX order; a share of a GPU counts as 1. ``spread``: every instance on a node of its own. ``roles`` has to be
    given in mode ps. ``resources`` is what each instance reserves, by Ray's names (CPU, GPU, memory in bytes): needed
    in mode ray, and where a GPU is shared.

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
    resources: Sequence[Mapping[str, float]] = ()
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
    "ps": ("RANK", "WORLD_SIZE", "TF_CONFIG", "PS_HOSTS", "WORKER_HOSTS", "JOB_NAME", "TASK_INDEX"),
    "ray": ("RANK", "HEAD_ADDR", "HEAD_PORT", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"),
}
SINGLE_ROLE = {"ddp": "master", "mpi": "launcher", "ray": "head"}

# What Ray gives a worker and a job may have as well, because raycontrol sets it too.
SET_AFRESH = {"PYTHONUNBUFFERED"}
SET_AFRESH_BY_MODE = {"ray": {"RAY_TMPDIR", "RAY_USAGE_STATS_ENABLED"}}


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
        if not is_port(env["MASTER_PORT"]):
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
    ours = {
        *job.env,
        *NAMES_BY_MODE[job.mode],
        *EVERYWHERE,
        *SET_AFRESH,
        *SET_AFRESH_BY_MODE.get(job.mode, ()),
    }
    for document in by_the_command(job):
        for name, value in sorted(document["env"].items()):
            if name in ours:
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
    for document in by_the_command(job):
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


# -- ps

IN_CLUSTER = ("chief", "worker", "ps")


def tf_config_has_its_three_parts(job: Job) -> Iterator[str]:
    for document in job.documents:
        if tf_config(document) is None:
            yield f"{who(document)}: TF_CONFIG is {document['env']['TF_CONFIG']!r}"


def the_task_is_the_role_counted_over_its_groups(job: Job) -> Iterator[str]:
    roles = [first["env"]["RAYCONTROL_ROLE"] for first in firsts(job)]
    for document in with_tf_config(job):
        role, index = document["env"]["RAYCONTROL_ROLE"], document["index"]
        number = roles[:index].count(role)
        task = json.loads(document["env"]["TF_CONFIG"])["task"]
        if task != {"type": role, "index": number}:
            yield f"{who(document)}: TF_CONFIG's task is {task}, this is {role} {number}"


def the_cluster_has_the_tasks_of_every_role_in_index_order(job: Job) -> Iterator[str]:
    """Where they listen is known by the address only: its port is free to choose."""
    wanted: dict[str, list[str]] = {}
    for first in firsts(job):
        if first["env"]["RAYCONTROL_ROLE"] in IN_CLUSTER:
            address = node_list(first["env"])[first["index"]][0]
            wanted.setdefault(first["env"]["RAYCONTROL_ROLE"], []).append(address)
    for document in with_tf_config(job):
        cluster = json.loads(document["env"]["TF_CONFIG"])["cluster"]
        found = {role: [host for host, _ in map(host_and_port, tasks)] for role, tasks in cluster.items()}
        if found != wanted:
            yield f"{who(document)}: TF_CONFIG's cluster is on {found}, not on {wanted}"
        for address in (address for tasks in cluster.values() for address in tasks):
            if not is_port(host_and_port(address)[1]):
                yield f"{who(document)}: TF_CONFIG names {address!r}, which has no port"


def all_have_the_same_cluster(job: Job) -> Iterator[str]:
    clusters = [json.loads(document["env"]["TF_CONFIG"])["cluster"] for document in with_tf_config(job)]
    for document, cluster in zip(with_tf_config(job), clusters, strict=True):
        if cluster != clusters[0]:
            yield f"{who(document)}: TF_CONFIG's cluster is {cluster}, elsewhere {clusters[0]}"


def no_port_of_a_node_is_given_twice(job: Job) -> Iterator[str]:
    for document in with_tf_config(job):
        counts = Counter(tasks_of(document))
        for address in (address for address, count in counts.items() if count > 1):
            yield f"{counts[address]} tasks listen at {address}"
        if master(document) in counts:
            yield f"a task listens at MASTER_PORT, {master(document)}"


def every_task_could_listen(job: Job) -> Iterator[str]:
    for document in firsts(job):
        if document["env"]["RAYCONTROL_ROLE"] in IN_CLUSTER and document["listened"] is not True:
            yield f"{who(document)}: could not listen on the port of its task"


def older_names_agree_with_tf_config(job: Job) -> Iterator[str]:
    for document in with_tf_config(job):
        config = json.loads(document["env"]["TF_CONFIG"])
        yield from unequal(document, "PS_HOSTS", ",".join(config["cluster"].get("ps", [])))
        yield from unequal(document, "WORKER_HOSTS", ",".join(config["cluster"].get("worker", [])))
        yield from unequal(document, "JOB_NAME", config["task"]["type"])
        yield from unequal(document, "TASK_INDEX", config["task"]["index"])


# -- ray

OBJECT_STORE_SHARE = 0.3


def the_head_is_index_0(job: Job) -> Iterator[str]:
    for document in job.documents:
        env = document["env"]
        yield from unequal(document, "RANK", document["index"])
        yield from unequal(document, "HEAD_ADDR", node_list(env)[0][0])
        yield from unequal(document, "HEAD_ADDR", env["MASTER_ADDR"])
        yield from unequal(document, "RAY_ADDRESS", f"{bracketed(env['HEAD_ADDR'])}:{env['HEAD_PORT']}")
        if not is_port(env["HEAD_PORT"]) or env["HEAD_PORT"] == env["MASTER_PORT"]:
            yield f"{who(document)}: HEAD_PORT is {env['HEAD_PORT']!r}, MASTER_PORT {env['MASTER_PORT']!r}"


def the_token_is_a_file_for_its_owner_alone(job: Job) -> Iterator[str]:
    for document in job.documents:
        yield from unequal(document, "RAY_AUTH_MODE", "token")
        if document["token_mode"] != 0o600:
            mode = (
                "is not there" if document["token_mode"] is None else f"has mode {document['token_mode']:o}"
            )
            yield f"{who(document)}: {document['env']['RAY_AUTH_TOKEN_PATH']}, the token's file, {mode}"


def a_plain_init_found_the_jobs_own_ray(job: Job) -> Iterator[str]:
    head = firsts(job)[0]
    if head["gcs_address"] != head["env"]["RAY_ADDRESS"]:
        yield f"{who(head)}: ray.init() found {head['gcs_address']}, RAY_ADDRESS is {head['env']['RAY_ADDRESS']}"


def every_instance_is_one_node_and_there_is_no_other(job: Job) -> Iterator[str]:
    found = [rank for node in living_nodes(job) for rank in ranks_of(node)]
    for rank in sorted({f"Rank:{index}" for index in range(job.instances)} - set(found)):
        yield f"no living Ray node has {rank}"
    if len(living_nodes(job)) != job.instances:
        yield f"Ray has {len(living_nodes(job))} living nodes for {job.instances} instances"
    for node in living_nodes(job):
        amounts = ranks_of(node)
        if list(amounts.values()) != [1] or any(found.count(rank) > 1 for rank in amounts):
            yield f"Ray node at {node['ip']}: has {amounts or 'no Rank'}"


def every_node_has_what_its_instance_reserved(job: Job) -> Iterator[str]:
    for document, node in nodes_of_instances(job):
        reserved = job.resources[document["index"]]
        wanted = {
            "CPU": reserved["CPU"],
            "GPU": math.ceil(reserved.get("GPU", 0)),
            "memory": reserved.get("memory", node["resources"].get("memory")),
        }
        for name, amount in wanted.items():
            if node["resources"].get(name, 0) != amount:
                yield f"Ray node of INDEX {document['index']}: has {name} {node['resources'].get(name, 0):g}, not {amount:g}"
        memory, store = (node["resources"].get(name, 0) for name in ("memory", "object_store_memory"))
        if not 0 < store <= OBJECT_STORE_SHARE * memory:
            yield f"Ray node of INDEX {document['index']}: has an object store of {store:g} in a memory of {memory:g}"


def every_node_is_where_its_instance_is_and_names_its_group(job: Job) -> Iterator[str]:
    for document, node in nodes_of_instances(job):
        env = document["env"]
        address, group = node_list(env)[document["index"]][0], env["RAYCONTROL_GROUP"]
        if node["ip"] != address:
            yield f"Ray node of INDEX {document['index']}: is at {node['ip']}, not {address}"
        if node["labels"].get("group") != group:
            yield f"Ray node of INDEX {document['index']}: has the label group={node['labels'].get('group')}, not {group}"


# -- jobs that run at once


def no_address_is_given_twice(jobs: Sequence[Job]) -> Iterator[str]:
    for (a, one), (b, other) in combinations(enumerate(jobs), 2):
        mine, others = addresses(one), addresses(other)
        for address in sorted(mine.keys() & others.keys()):
            yield f"{address} is {mine[address]} of job {a} and {others[address]} of job {b}"


def rays_share_no_node(jobs: Sequence[Job]) -> Iterator[str]:
    rays = [(number, job) for number, job in enumerate(jobs) if job.mode == "ray"]
    for (a, one), (b, other) in combinations(rays, 2):
        listed = [{node["id"]: node["ip"] for node in firsts(job)[0]["nodes"]} for job in (one, other)]
        for node in sorted(listed[0].keys() & listed[1].keys()):
            yield f"jobs {a} and {b} both list the Ray node {node} at {listed[0][node]}"


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
    """Instances that ask for shares of one GPU may meet on it, as long as these add up to no more than all of it."""
    given: dict[tuple[str, str], dict[str, float]] = {}
    for number, job in enumerate(jobs):
        for document in firsts(job):
            instance = f"INDEX {document['index']} of job {number}"
            for device in devices(document["env"]):
                holders = given.setdefault((document["hostname"], device), {})
                holders[instance] = share_of_a_gpu(job, document["index"])
    for (host, device), holders in given.items():
        if sum(holders.values()) > 1 + 1e-6:
            yield f"GPU {device} of {host} was given to {' and '.join(holders)}"


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
    "ps": (
        rank_is_index_and_world_size_counts_instances,
        tf_config_has_its_three_parts,
        the_task_is_the_role_counted_over_its_groups,
        the_cluster_has_the_tasks_of_every_role_in_index_order,
        all_have_the_same_cluster,
        no_port_of_a_node_is_given_twice,
        every_task_could_listen,
        older_names_agree_with_tf_config,
    ),
    "ray": (
        the_head_is_index_0,
        the_token_is_a_file_for_its_owner_alone,
        a_plain_init_found_the_jobs_own_ray,
        every_instance_is_one_node_and_there_is_no_other,
        every_node_has_what_its_instance_reserved,
        every_node_is_where_its_instance_is_and_names_its_group,
    ),
}
TOGETHER: tuple[Callable[[Sequence[Job]], Iterable[str]], ...] = (
    no_address_is_given_twice,
    rays_share_no_node,
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
    return [host_and_port(entry) for entry in env["NODE_LIST"].split(",")]


def host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def devices(env: Mapping[str, str]) -> list[str]:
    return [device for device in env["CUDA_VISIBLE_DEVICES"].split(",") if device not in ("", "-1")]


def firsts(job: Job) -> list[Document]:
    """The first process of each instance, in INDEX order."""
    return sorted((one for one in job.documents if one["local"] == 0), key=lambda one: int(one["index"]))


def by_the_command(job: Job) -> list[Document]:
    """Without those that tasks of a job's own Ray have written: what such a process is like is Ray's to decide."""
    return [document for document in job.documents if document["by"] == "command"]


def share_of_a_gpu(job: Job, index: int) -> float:
    return min(1, job.resources[index].get("GPU", 1)) if job.resources else 1


def tf_config(document: Document) -> dict[str, Any] | None:
    """``{"cluster": {role: [address]}, "task": {"type", "index"}, "environment": "cloud"}``, or None for anything else."""
    try:
        config = json.loads(document["env"]["TF_CONFIG"])
        lists = list(config["cluster"].values())
        fields = config.keys(), config["task"].keys(), config["environment"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    texts = all(isinstance(tasks, list) and all(isinstance(one, str) for one in tasks) for tasks in lists)
    wanted = {"cluster", "task", "environment"}, {"type", "index"}, "cloud"
    return dict(config) if texts and fields == wanted else None


def with_tf_config(job: Job) -> list[Document]:
    return [document for document in job.documents if tf_config(document) is not None]


def tasks_of(document: Document) -> list[str]:
    """The addresses of all tasks in TF_CONFIG."""
    config = tf_config(document)
    return [address for tasks in config["cluster"].values() for address in tasks] if config else []


def master(document: Document) -> str:
    return f"{bracketed(document['env']['MASTER_ADDR'])}:{document['env']['MASTER_PORT']}"


def addresses(job: Job) -> dict[str, str]:
    """Where the job's own processes may listen, and what that address is to them."""
    first = firsts(job)[0]
    tasks = dict.fromkeys(tasks_of(first) if job.mode == "ps" else (), "the address of a task")
    head = {first["env"]["RAY_ADDRESS"]: "RAY_ADDRESS"} if job.mode == "ray" else {}
    return {**tasks, **head, master(first): "MASTER_PORT"}


def living_nodes(job: Job) -> list[Mapping[str, Any]]:
    return [node for node in firsts(job)[0]["nodes"] if node["alive"]]


def ranks_of(node: Mapping[str, Any]) -> dict[str, float]:
    return {name: amount for name, amount in node["resources"].items() if name.startswith("Rank:")}


def nodes_of_instances(job: Job) -> Iterator[tuple[Document, Mapping[str, Any]]]:
    """Each instance with the node that has its rank; without those for which there is none, or more than one."""
    for document in firsts(job):
        nodes = [node for node in living_nodes(job) if f"Rank:{document['index']}" in ranks_of(node)]
        if len(nodes) == 1:
            yield document, nodes[0]


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


def is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def is_loopback(text: str) -> bool:
    return is_ip(text) and ipaddress.ip_address(text).is_loopback
