"""The checker of the environment contract finds nothing wrong with a good job, and each thing that is wrong."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checker import Job, violations

PROBE = Path(__file__).resolve().parents[1] / "hosts/probe/probe.py"


def document(
    index: int, local: int, job: str = "j1", port: int = 29501, devices: str = "0,1"
) -> dict[str, Any]:
    """What one process of a ddp job of three instances with two GPUs each would write."""
    return {
        "by": "command",
        "index": index,
        "local": local,
        "started": 100.0,
        "ended": 110.0,
        "env": {
            "PATH": "/opt/stand-ins:/usr/bin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "GREETING": "hello",
            "NODE_LIST": "10.0.0.10:2,10.0.0.11:2,10.0.0.12:2",
            "NODE_NUM": "3",
            "INDEX": str(index),
            "GPU_NUM": "6",
            "GPU_NUM_PER_NODE": "2",
            "CUDA_VISIBLE_DEVICES": devices,
            "MASTER_ADDR": "10.0.0.10",
            "MASTER_PORT": str(port),
            "RANK": str(index),
            "WORLD_SIZE": "3",
            "PET_NNODES": "3",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "10.0.0.10",
            "PET_MASTER_PORT": str(port),
            "RAYCONTROL_JOB_ID": job,
            "RAYCONTROL_JOB_NAME": "probe",
            "RAYCONTROL_ATTEMPT": "0",
            "RAYCONTROL_ATTEMPT_ID": f"{job}.0.{index}",
            "RAYCONTROL_GROUP": "master" if index == 0 else "worker",
            "RAYCONTROL_ROLE": "master" if index == 0 else "worker",
            "RAYCONTROL_INSTANCE": "master-0" if index == 0 else f"worker-{index - 1}",
            "RAYCONTROL_SLOTS": "2",
            "RAYCONTROL_NP": "6",
            "RAYCONTROL_NODE_NAMES": "h0,h1,h2",
            "RAYCONTROL_CODE_DIR": f"/scratch/{job}/code",
            "RAYCONTROL_OUTPUT_DIR": f"/scratch/{job}/outputs/{index}",
            "PYTHONUNBUFFERED": "1",
        },
        "hostname": f"h{index}",
        "addresses": ["127.0.0.1", f"10.0.0.1{index}"],
        "cwd": f"/scratch/{job}/code",
        "files": ["data/a.txt", "probe.py"],
        "writable": True,
        "pid": 100 + local,
        "uid": 0,
        "stdin": "/dev/null",
        "descriptors": [],
        "nice": 0,
        "oom_score_adj": 0,
        "blocked_signals": [],
        "umask": 0o022,
        "bound": index == local == 0,
        "seen": ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"],
        "reached": ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"],
    }


def good(job: str = "j1", **rest: Any) -> Job:
    documents = [document(index, local, job, **rest) for index in range(3) for local in range(2)]
    return Job(
        documents,
        slots=(2, 2, 2),
        gpus=(2, 2, 2),
        name="probe",
        env={"GREETING": "hello"},
        files=("probe.py",),
        node_env={"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "RAY_AUTH_MODE": "disabled"},
        worker_env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HOME": "/root", "NEW_IN_RAY": "x"},
    )


Change = Callable[[dict[str, Any]], object]


def changed(job: Job, place: int, change: Change) -> Job:
    """The job with one of its documents changed."""
    documents: list[Any] = copy.deepcopy(list(job.documents))
    change(documents[place])
    return replace(job, documents=documents)


def setting(**variables: str) -> Change:
    return lambda document: document["env"].update(variables)


def test_a_good_job_breaks_no_rule() -> None:
    assert violations([good()]) == []


def test_two_good_jobs_side_by_side_break_no_rule() -> None:
    assert violations([good("j1"), good("j2", port=29502, devices="2,3")]) == []


def test_a_job_without_gpus_breaks_no_rule() -> None:
    job = good()
    for one in job.documents:
        one["env"].update(
            NODE_LIST="10.0.0.10:0,10.0.0.11:0,10.0.0.12:0",
            GPU_NUM="0",
            GPU_NUM_PER_NODE="0",
            CUDA_VISIBLE_DEVICES="",
        )
    assert violations([replace(job, gpus=(0, 0, 0))]) == []


BROKEN: dict[str, Change] = {
    "INDEX 1, process 0: NODE_LIST[INDEX] is 10.0.0.11, this host has 127.0.0.1, 10.0.0.99": (
        lambda one: one.update(addresses=["127.0.0.1", "10.0.0.99"])
    ),
    "INDEX 1, process 0: NODE_LIST names 'h1', which is no IP address": setting(
        NODE_LIST="10.0.0.10:2,h1:2,10.0.0.12:2"
    ),
    "INDEX 1, process 0: NODE_LIST has 2 entries for 3 instances": setting(
        NODE_LIST="10.0.0.10:2,10.0.0.11:2"
    ),
    "INDEX 1, process 0: the GPUs of NODE_LIST 10.0.0.10:4,10.0.0.11:2,10.0.0.12:2 do not add up to GPU_NUM 6": (
        setting(NODE_LIST="10.0.0.10:4,10.0.0.11:2,10.0.0.12:2")
    ),
    "INDEX 1, process 0: MASTER_ADDR is 10.0.0.11, INDEX 0 is 10.0.0.10": setting(MASTER_ADDR="10.0.0.11"),
    "MASTER_PORT differs between processes: 29501 | 29777": setting(MASTER_PORT="29777"),
    "INDEX 1, process 0: could not connect to the master": lambda one: one["reached"].remove("0-0"),
    "INDEX 1, process 0: did not see 2-1": lambda one: one["seen"].remove("2-1"),
    "INDEX 1, process 0: RANK is '3', not '1'": setting(RANK="3"),
    "INDEX 1, process 0: WORLD_SIZE is '6', not '3'": setting(WORLD_SIZE="6"),
    "INDEX 1, process 0: PET_NPROC_PER_NODE is '1', not '2'": setting(PET_NPROC_PER_NODE="1"),
    "INDEX 1, process 0: PET_MASTER_PORT is '29500', not '29501'": setting(PET_MASTER_PORT="29500"),
    "INDEX 1, process 0: RAYCONTROL_NP is '2', not '6'": setting(RAYCONTROL_NP="2"),
    "INDEX 1, process 0: RAYCONTROL_ROLE is 'master', not 'worker'": setting(RAYCONTROL_ROLE="master"),
    "INDEX 1, process 0: instance worker-1 follows worker--1": setting(RAYCONTROL_INSTANCE="worker-1"),
    "INDEX 1, process 0: CUDA_VISIBLE_DEVICES is '0', the instance has 2 GPUs": setting(
        CUDA_VISIBLE_DEVICES="0"
    ),
    "INDEX 1, process 0: MASTER_ADDR is not set": lambda one: one["env"].pop("MASTER_ADDR"),
    "INDEX 1, process 0: RAY_JOB_ID=01000000 comes from Ray": setting(RAY_JOB_ID="01000000"),
    "INDEX 1, process 0: RAY_AUTH_MODE=disabled comes from Ray": setting(RAY_AUTH_MODE="disabled"),
    "INDEX 1, process 0: OMP_NUM_THREADS=1 comes from Ray": setting(OMP_NUM_THREADS="1"),
    "INDEX 1, process 0: NEW_IN_RAY=x comes from Ray": setting(NEW_IN_RAY="x"),
    "INDEX 1, process 0: LD_PRELOAD=/v/site-packages/ray/core/libjemalloc.so comes from Ray": setting(
        LD_PRELOAD="/v/site-packages/ray/core/libjemalloc.so"
    ),
    "INDEX 1, process 0: PYTHONBREAKPOINT=ray.util.rpdb.set_trace comes from Ray": setting(
        PYTHONBREAKPOINT="ray.util.rpdb.set_trace"
    ),
    "INDEX 1, process 0: GREETING is 'bye', not 'hello'": setting(GREETING="bye"),
    "INDEX 1, process 0: LANG is None, not 'C.UTF-8'": lambda one: one["env"].pop("LANG"),
    "INDEX 1, process 0: PATH lacks the node's /bin": setting(PATH="/opt/stand-ins:/usr/bin"),
    "INDEX 1, process 0: nice is 15, not 0": lambda one: one.update(nice=15),
    "INDEX 1, process 0: blocked_signals is [2], not []": lambda one: one.update(blocked_signals=[2]),
    "INDEX 1, process 0: descriptors is ['socket:[7]'], not []": (
        lambda one: one.update(descriptors=["socket:[7]"])
    ),
    "INDEX 1, process 0: runs in /, RAYCONTROL_CODE_DIR is /scratch/j1/code": lambda one: one.update(cwd="/"),
    "INDEX 1, process 0: probe.py not in /scratch/j1/code": lambda one: one.update(files=[]),
    "two instances share a node: h0, h0, h2": lambda one: one.update(hostname="h0"),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_broken_rule_is_named(sentence: str) -> None:
    first_of_index_1 = 2
    assert f"job: {sentence}" in violations([changed(good(), first_of_index_1, BROKEN[sentence])])


def test_a_silent_process_is_named_and_nothing_else() -> None:
    job = good()
    assert violations([replace(job, documents=job.documents[:-1])]) == [
        "job: process 1 of INDEX 2 has not reported"
    ]


def test_a_process_too_many_is_named() -> None:
    job = good()
    assert violations([replace(job, documents=[*job.documents, document(3, 0)])]) == [
        "job: process 0 of INDEX 3 should not exist"
    ]


def test_what_two_jobs_must_not_share_is_named() -> None:
    assert violations([good("j1"), good("j1")]) == [
        "10.0.0.10:29501 is MASTER_PORT of job 0 and MASTER_PORT of job 1",
        "jobs 0 and 1 share RAYCONTROL_JOB_ID j1",
        "jobs 0 and 1 share RAYCONTROL_ATTEMPT_ID j1.0.0, j1.0.1, j1.0.2",
        "jobs 0 and 1 share RAYCONTROL_CODE_DIR /scratch/j1/code on h0",
        "jobs 0 and 1 share RAYCONTROL_CODE_DIR /scratch/j1/code on h1",
        "jobs 0 and 1 share RAYCONTROL_CODE_DIR /scratch/j1/code on h2",
        "jobs 0 and 1 share RAYCONTROL_OUTPUT_DIR /scratch/j1/outputs/0 on h0",
        "jobs 0 and 1 share RAYCONTROL_OUTPUT_DIR /scratch/j1/outputs/1 on h1",
        "jobs 0 and 1 share RAYCONTROL_OUTPUT_DIR /scratch/j1/outputs/2 on h2",
        "GPU 0 of h0 was given to INDEX 0 of job 0 and INDEX 0 of job 1",
        "GPU 1 of h0 was given to INDEX 0 of job 0 and INDEX 0 of job 1",
        "GPU 0 of h1 was given to INDEX 1 of job 0 and INDEX 1 of job 1",
        "GPU 1 of h1 was given to INDEX 1 of job 0 and INDEX 1 of job 1",
        "GPU 0 of h2 was given to INDEX 2 of job 0 and INDEX 2 of job 1",
        "GPU 1 of h2 was given to INDEX 2 of job 0 and INDEX 2 of job 1",
    ]


def test_jobs_that_ran_one_after_the_other_prove_nothing() -> None:
    later = good("j2", port=29502, devices="2,3")
    documents = [{**one, "started": 120.0, "ended": 130.0} for one in later.documents]
    assert violations([good("j1"), replace(later, documents=documents)]) == [
        "the jobs did not run at the same time: the last began 10.0 s after the first ended"
    ]


# -- mode ps

PLACES = (  # group, role and host of every instance
    ("chief", "chief", 0),
    ("worker", "worker", 0),
    ("ps", "ps", 1),
    ("big", "worker", 1),
    ("evaluator", "evaluator", 2),
)


def good_ps(job: str = "j1", port: int = 29501, task_port: int = 4000) -> Job:
    """Five instances without GPUs on three hosts; the port of an instance's task is ``task_port`` and its INDEX."""
    cluster = {
        "chief": [f"10.0.0.10:{task_port}"],
        "worker": [f"10.0.0.10:{task_port + 1}", f"10.0.0.11:{task_port + 3}"],
        "ps": [f"10.0.0.11:{task_port + 2}"],
    }
    documents = [document(index, 0, job, port, devices="") for index in range(5)]
    for index, number in enumerate((0, 0, 0, 1, 0)):
        group, role, host = PLACES[index]
        task = {"type": role, "index": number}
        put(documents[index], group, role, host, [0] * 5, [place[2] for place in PLACES])
        documents[index]["listened"] = True if role in cluster else None
        documents[index]["env"] |= {
            "WORLD_SIZE": "5",
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"}),
            "PS_HOSTS": cluster["ps"][0],
            "WORKER_HOSTS": ",".join(cluster["worker"]),
            "JOB_NAME": role,
            "TASK_INDEX": str(number),
        }
    roles = [role for _, role, _ in PLACES]
    return replace(
        good(), documents=documents, slots=(1,) * 5, gpus=(0,) * 5, mode="ps", spread=False, roles=roles
    )


def put(
    one: dict[str, Any], group: str, role: str, host: int, gpus: Sequence[int], hosts: Sequence[int]
) -> None:
    """Put a document's instance, the first of its group, on a host, in a job of one process per instance."""
    everybody = [f"{index}-0" for index in range(len(hosts))]
    address, others = f"10.0.0.1{host}", zip(hosts, gpus, strict=True)
    one.update(hostname=f"h{host}", addresses=["127.0.0.1", address], seen=everybody, reached=everybody)
    one["env"] |= {
        "NODE_LIST": ",".join(f"10.0.0.1{other}:{number}" for other, number in others),
        "NODE_NUM": str(len(hosts)),
        "GPU_NUM": str(sum(gpus)),
        "GPU_NUM_PER_NODE": str(gpus[one["index"]]),
        "RAYCONTROL_GROUP": group,
        "RAYCONTROL_ROLE": role,
        "RAYCONTROL_INSTANCE": f"{group}-0",
        "RAYCONTROL_SLOTS": "1",
        "RAYCONTROL_NP": str(len(hosts)),
        "RAYCONTROL_NODE_NAMES": ",".join(f"h{other}" for other in hosts),
    }


def telling(change: Callable[[Any], object]) -> Change:
    """Change what TF_CONFIG says."""

    def apply(one: dict[str, Any]) -> None:
        config = json.loads(one["env"]["TF_CONFIG"])
        change(config)
        one["env"]["TF_CONFIG"] = json.dumps(config)

    return apply


def test_good_ps_jobs_break_no_rule() -> None:
    assert violations([good_ps()]) == []
    assert violations([good_ps(), good_ps("j2", port=29502, task_port=4100)]) == []


CLUSTER = (
    "{'chief': ['10.0.0.10:4000'], 'worker': ['10.0.0.10:4001', '10.0.0.11:4003'], 'ps': ['10.0.0.11:4002']}"
)
HOSTS_OF_ROLES = "{'chief': ['10.0.0.10'], 'worker': ['10.0.0.10', '10.0.0.11'], 'ps': ['10.0.0.11']}"

# Of big-0, which is worker 1.
BROKEN_PS: dict[str, Change] = {
    "INDEX 3, process 0: RANK is '1', not '3'": setting(RANK="1"),
    "INDEX 3, process 0: WORLD_SIZE is '4', not '5'": setting(WORLD_SIZE="4"),
    "INDEX 3, process 0: RAYCONTROL_ROLE is 'ps', not 'worker'": setting(RAYCONTROL_ROLE="ps"),
    "INDEX 3, process 0: TF_CONFIG is not set": lambda one: one["env"].pop("TF_CONFIG"),
    "INDEX 3, process 0: TF_CONFIG is 'cloud'": setting(TF_CONFIG="cloud"),
    "INDEX 3, process 0: TF_CONFIG is '{}'": setting(TF_CONFIG="{}"),
    'INDEX 3, process 0: TF_CONFIG is \'{"cluster": {}, "task": {"type": "worker", "index": 1}, "environment": "lab"}\'': (
        telling(lambda config: config.update(cluster={}, environment="lab"))
    ),
    'INDEX 3, process 0: TF_CONFIG is \'{"cluster": {}, "task": {"type": "worker"}, "environment": "cloud"}\'': (
        telling(lambda config: config.update(cluster={}, task={"type": "worker"}))
    ),
    'INDEX 3, process 0: TF_CONFIG is \'{"cluster": {"ps": "h:1"}, "task": {"type": "ps", "index": 0}, "environment": "cloud"}\'': (
        telling(lambda config: config.update(cluster={"ps": "h:1"}, task={"type": "ps", "index": 0}))
    ),
    "INDEX 3, process 0: TF_CONFIG's task is {'type': 'worker', 'index': 0}, this is worker 1": telling(
        lambda config: config["task"].update(index=0)
    ),
    "INDEX 3, process 0: TF_CONFIG's task is {'type': 'ps', 'index': 1}, this is worker 1": telling(
        lambda config: config["task"].update(type="ps")
    ),
    f"INDEX 3, process 0: TF_CONFIG's cluster is on {HOSTS_OF_ROLES[:-1]}, 'evaluator': ['10.0.0.12']}}, not on {HOSTS_OF_ROLES}": (
        telling(lambda config: config["cluster"].update(evaluator=["10.0.0.12:4004"]))
    ),
    "INDEX 3, process 0: TF_CONFIG's cluster is on {'chief': ['10.0.0.10'], 'ps': ['10.0.0.11']}, "
    f"not on {HOSTS_OF_ROLES}": telling(lambda config: config["cluster"].pop("worker")),
    "INDEX 3, process 0: TF_CONFIG's cluster is on {'chief': ['10.0.0.10'], 'worker': ['10.0.0.11', '10.0.0.10'], "
    f"'ps': ['10.0.0.11']}}, not on {HOSTS_OF_ROLES}": telling(
        lambda config: config["cluster"]["worker"].reverse()
    ),
    "INDEX 3, process 0: TF_CONFIG names '10.0.0.11:', which has no port": telling(
        lambda config: config["cluster"].update(ps=["10.0.0.11:"])
    ),
    f"INDEX 3, process 0: TF_CONFIG's cluster is {CLUSTER.replace('4002', '4009')}, elsewhere {CLUSTER}": (
        telling(lambda config: config["cluster"].update(ps=["10.0.0.11:4009"]))
    ),
    "2 tasks listen at 10.0.0.11:4003": telling(
        lambda config: config["cluster"].update(ps=["10.0.0.11:4003"])
    ),
    "a task listens at MASTER_PORT, 10.0.0.10:29501": telling(
        lambda config: config["cluster"].update(chief=["10.0.0.10:29501"])
    ),
    "INDEX 3, process 0: could not listen on the port of its task": lambda one: one.update(listened=False),
    "INDEX 3, process 0: PS_HOSTS is '', not '10.0.0.11:4002'": setting(PS_HOSTS=""),
    "INDEX 3, process 0: WORKER_HOSTS is 'h1:4003', not '10.0.0.10:4001,10.0.0.11:4003'": setting(
        WORKER_HOSTS="h1:4003"
    ),
    "INDEX 3, process 0: JOB_NAME is 'big', not 'worker'": setting(JOB_NAME="big"),
    "INDEX 3, process 0: TASK_INDEX is '0', not '1'": setting(TASK_INDEX="0"),
}


@pytest.mark.parametrize("sentence", BROKEN_PS)
def test_a_broken_rule_of_mode_ps_is_named(sentence: str) -> None:
    assert f"job: {sentence}" in violations([changed(good_ps(), 3, BROKEN_PS[sentence])])


def test_addresses_that_two_ps_jobs_must_not_share_are_named() -> None:
    assert violations([good_ps(), good_ps("j2", port=29502)]) == [
        f"{address} is the address of a task of job 0 and the address of a task of job 1"
        for address in ("10.0.0.10:4000", "10.0.0.10:4001", "10.0.0.11:4002", "10.0.0.11:4003")
    ]
    assert violations([good_ps(), good_ps("j2", port=4001, task_port=4100)]) == [
        "10.0.0.10:4001 is the address of a task of job 0 and MASTER_PORT of job 1"
    ]


# -- mode ray


def good_ray(job: str = "j1", port: int = 29501, head_port: int = 6001, half: str = "2") -> Job:
    """A head on one host; beside each other on another one a worker with two GPUs and one with half a GPU, ``half``."""
    places = (("head", "head", 0, ""), ("whole", "worker", 1, "0,1"), ("part", "worker", 1, half))
    documents = [document(index, 0, job, port, devices) for index, (_, _, _, devices) in enumerate(places)]
    nodes = []
    for index, (group, role, host, _) in enumerate(places):
        put(documents[index], group, role, host, [0, 2, 1], [0, 1, 1])
        # What a task of the job's own Ray finds around it is Ray's.
        documents[index] |= (
            {"token_mode": 0o600} if index == 0 else {"token_mode": 0o600, "by": "task", "nice": 15}
        )
        documents[index]["env"] |= {
            "HEAD_ADDR": "10.0.0.10",
            "HEAD_PORT": str(head_port),
            "RAY_ADDRESS": f"10.0.0.10:{head_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"/scratch/{job}/{index}/token",
            "RAY_TMPDIR": "/tmp/rc-1",
        }
        documents[index]["env"] |= {"RAY_JOB_ID": "01000000"} if index else {}
        resources = {"CPU": 1, "GPU": (0, 2, 1)[index], "memory": 1000, "object_store_memory": 300}
        resources |= {f"Rank:{index}": 1, f"node:10.0.0.1{host}": 1}
        labels = {"group": group, "ray.io/node-id": f"{job}-{index}"}
        nodes.append(
            {
                "id": f"{job}-{index}",
                "alive": True,
                "ip": f"10.0.0.1{host}",
                "resources": resources,
                "labels": labels,
            }
        )
    documents[0] |= {"gcs_address": f"10.0.0.10:{head_port}", "nodes": nodes}
    return replace(
        good(),
        documents=documents,
        slots=(1, 1, 1),
        gpus=(0, 2, 1),
        mode="ray",
        spread=False,
        resources=({"CPU": 1, "memory": 1000}, {"CPU": 1, "GPU": 2, "memory": 1000}, {"CPU": 1, "GPU": 0.5}),
    )


def node(rank: int, **fields: Any) -> Change:
    return lambda one: one["nodes"][rank].update(fields)


def resource(rank: int, **amounts: float) -> Change:
    return lambda one: one["nodes"][rank]["resources"].update(amounts)


def test_good_ray_jobs_break_no_rule() -> None:
    assert violations([good_ray()]) == []
    without = changed(good_ray(), 0, lambda one: one["nodes"][0]["resources"].pop("GPU"))
    assert violations([without]) == []
    beside = good_ray("j2", port=29502, head_port=6002)
    for one in beside.documents:
        one["env"]["CUDA_VISIBLE_DEVICES"] = ("", "3,4", "2")[one["index"]]  # the other half of GPU 2
    assert violations([good_ray(), beside]) == []


# Of the worker with half a GPU, or of what the head has seen.
BROKEN_RAY: dict[str, tuple[int, Change]] = {
    "INDEX 2, process 0: RANK is '1', not '2'": (2, setting(RANK="1")),
    "INDEX 2, process 0: HEAD_ADDR is '10.0.0.11', not '10.0.0.10'": (2, setting(HEAD_ADDR="10.0.0.11")),
    "INDEX 2, process 0: HEAD_PORT is '0', MASTER_PORT '29501'": (2, setting(HEAD_PORT="0")),
    "INDEX 2, process 0: HEAD_PORT is '29501', MASTER_PORT '29501'": (2, setting(HEAD_PORT="29501")),
    "INDEX 2, process 0: RAY_ADDRESS is 'auto', not '10.0.0.10:6001'": (2, setting(RAY_ADDRESS="auto")),
    "INDEX 2, process 0: RAY_ADDRESS is not set": (2, lambda one: one["env"].pop("RAY_ADDRESS")),
    "INDEX 2, process 0: RAY_AUTH_MODE is 'disabled', not 'token'": (2, setting(RAY_AUTH_MODE="disabled")),
    "INDEX 2, process 0: /scratch/j1/2/token, the token's file, is not there": (
        2,
        lambda one: one.update(token_mode=None),
    ),
    "INDEX 2, process 0: /scratch/j1/2/token, the token's file, has mode 644": (
        2,
        lambda one: one.update(token_mode=0o644),
    ),
    "INDEX 2, process 0: GREETING is 'bye', not 'hello'": (2, setting(GREETING="bye")),
    "INDEX 2, process 0: RAYCONTROL_INSTANCE is 'head-0' in group 'part'": (
        2,
        setting(RAYCONTROL_INSTANCE="head-0"),
    ),
    "INDEX 2, process 0: runs in /, RAYCONTROL_CODE_DIR is /scratch/j1/code": (
        2,
        lambda one: one.update(cwd="/"),
    ),
    "INDEX 0, process 0: nice is 15, not 0": (0, lambda one: one.update(nice=15)),
    "INDEX 0, process 0: RAY_JOB_ID=01000000 comes from Ray": (0, setting(RAY_JOB_ID="01000000")),
    "INDEX 0, process 0: ray.init() found 10.0.0.10:6379, RAY_ADDRESS is 10.0.0.10:6001": (
        0,
        lambda one: one.update(gcs_address="10.0.0.10:6379"),
    ),
    "no living Ray node has Rank:2": (0, node(2, alive=False)),
    "Ray has 2 living nodes for 3 instances": (0, node(2, alive=False)),
    "Ray has 4 living nodes for 3 instances": (0, lambda one: one["nodes"].append(one["nodes"][2])),
    "Ray node at 10.0.0.11: has {'Rank:2': 1, 'Rank:1': 1}": (0, resource(2, **{"Rank:1": 1})),
    "Ray node at 10.0.0.11: has {'Rank:2': 2}": (0, resource(2, **{"Rank:2": 2})),
    "Ray node at 10.0.0.11: has no Rank": (0, node(2, resources={"CPU": 1})),
    "Ray node of INDEX 2: has CPU 4, not 1": (0, resource(2, CPU=4)),
    "Ray node of INDEX 2: has GPU 0.5, not 1": (0, resource(2, GPU=0.5)),
    "Ray node of INDEX 0: has GPU 1, not 0": (0, resource(0, GPU=1)),
    "Ray node of INDEX 1: has memory 2000, not 1000": (0, resource(1, memory=2000)),
    "Ray node of INDEX 2: has an object store of 301 in a memory of 1000": (
        0,
        resource(2, object_store_memory=301),
    ),
    "Ray node of INDEX 2: is at 10.0.0.10, not 10.0.0.11": (0, node(2, ip="10.0.0.10")),
    "Ray node of INDEX 2: has the label group=worker, not part": (0, node(2, labels={"group": "worker"})),
    "Ray node of INDEX 2: has the label group=None, not part": (0, node(2, labels={})),
}


@pytest.mark.parametrize("sentence", BROKEN_RAY)
def test_a_broken_rule_of_mode_ray_is_named(sentence: str) -> None:
    place, change = BROKEN_RAY[sentence]
    assert f"job: {sentence}" in violations([changed(good_ray(), place, change)])


def test_an_instance_on_which_the_start_command_runs_besides_the_task_is_named() -> None:
    job = good_ray()
    twice = replace(job, documents=[*job.documents, {**job.documents[2], "by": "command"}])
    assert violations([twice]) == ["job: process 0 of INDEX 2 reported 2 times"]


def test_what_two_ray_jobs_must_not_share_is_named() -> None:
    same = good_ray("j2", port=29502, half="3")
    same.documents[0]["nodes"].append({**good_ray().documents[0]["nodes"][2], "alive": False})
    same.documents[1]["env"]["CUDA_VISIBLE_DEVICES"] = "4,5"
    assert violations([good_ray(), same]) == [
        "10.0.0.10:6001 is RAY_ADDRESS of job 0 and RAY_ADDRESS of job 1",
        "jobs 0 and 1 both list the Ray node j1-2 at 10.0.0.11",
    ]


def test_shares_of_a_gpu_must_not_be_more_than_all_of_it() -> None:
    others = [good_ray(f"j{number}", port=29500 + number, head_port=6000 + number) for number in (2, 3)]
    for number, one in enumerate(job.documents[1] for job in others):
        one["env"]["CUDA_VISIBLE_DEVICES"] = ("3,4", "5,6")[number]
    assert violations([good_ray(), *others]) == [
        "GPU 2 of h1 was given to INDEX 2 of job 0 and INDEX 2 of job 1 and INDEX 2 of job 2"
    ]


# -- the probe


def test_the_probe_writes_what_the_checker_reads(tmp_path: Path) -> None:
    printed = run_probes(tmp_path, [{}, {}])
    kept = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outputs-*/probe-*.json"))]
    assert kept == sorted(printed, key=lambda one: (one["index"], one["local"]))
    job = Job(kept, slots=(2, 2), gpus=(0, 0), spread=False, files=("mine.txt",))
    assert of_the_job(violations([job])) == []


def test_the_probe_tries_the_port_of_its_task(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"worker": free_port(), "ps": taken.getsockname()[1]}
        cluster = {role: [f"127.0.0.1:{port}"] for role, port in ports.items()}
        environments = [
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": role, "index": 0}, "environment": "cloud"}
                ),
                "PS_HOSTS": cluster["ps"][0],
                "WORKER_HOSTS": cluster["worker"][0],
                "JOB_NAME": role,
                "TASK_INDEX": "0",
                "RAYCONTROL_GROUP": role,
                "RAYCONTROL_ROLE": role,
                "RAYCONTROL_INSTANCE": f"{role}-0",
            }
            for role in cluster
        ]
        documents = run_probes(tmp_path, environments)
    roles = tuple(cluster)
    job = Job(documents, slots=(2, 2), gpus=(0, 0), mode="ps", spread=False, roles=roles)
    assert of_the_job(violations([job])) == [
        "job: INDEX 1, process 0: could not listen on the port of its task"
    ]


def run_probes(folder: Path, environments: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Let the probe be the instances of a job on this machine, one for each environment; what they print."""
    port = free_port()
    runs = [start_probe(folder, index, port, env) for index, env in enumerate(environments)]
    printed = [run.communicate(timeout=30)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs)
    lines = [line for text in printed for line in text.splitlines() if line.startswith("PROBE ")]
    return [json.loads(line.removeprefix("PROBE ")) for line in lines]


def of_the_job(sentences: Sequence[str]) -> list[str]:
    """Without what this process has given to the probe of its own, which is no job's."""
    own = (": oom_score_adj is", ": nice is", ": blocked_signals is", ": umask is")
    return [text for text in sentences if not any(part in text for part in own)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def start_probe(folder: Path, index: int, port: int, more: dict[str, str]) -> subprocess.Popen[str]:
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code/mine.txt").touch()
    (folder / f"outputs-{index}").mkdir()
    env = {name: value for name, value in document(index, 0, port=port)["env"].items() if name != "GREETING"}
    env |= {
        "PATH": os.environ["PATH"],
        "NODE_LIST": "127.0.0.1:0,127.0.0.1:0",
        "NODE_NUM": "2",
        "WORLD_SIZE": "2",
        "PET_NNODES": "2",
        "PET_MASTER_ADDR": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "GPU_NUM": "0",
        "GPU_NUM_PER_NODE": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "RAYCONTROL_NP": "4",
        "RAYCONTROL_NODE_NAMES": "h,h",
        "RAYCONTROL_CODE_DIR": str(folder / "code"),
        "RAYCONTROL_OUTPUT_DIR": str(folder / f"outputs-{index}"),
        **more,
    }
    return subprocess.Popen(
        [sys.executable, str(PROBE)],
        env=env,
        cwd=folder / "code",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
