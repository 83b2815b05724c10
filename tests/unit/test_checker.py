"""The checker of the environment contract finds nothing wrong with a good job, and each thing that is wrong."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
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


def changed(index: int, local: int, change: Callable[[dict[str, Any]], object]) -> Job:
    """The good job with one of its documents changed."""
    job = good()
    documents = copy.deepcopy(list(job.documents))
    change(documents[index * 2 + local])
    return replace(job, documents=documents)


def setting(**variables: str) -> Callable[[dict[str, Any]], object]:
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


BROKEN = {
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
    found = violations([changed(1, 0, BROKEN[sentence])])
    assert f"job: {sentence}" in found


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
        "jobs 0 and 1 have the same MASTER_PORT 29501",
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
    for one in later.documents:
        one.update(started=120.0, ended=130.0)
    assert violations([good("j1"), later]) == [
        "the jobs did not run at the same time: the last began 10.0 s after the first ended"
    ]


def test_the_probe_writes_what_the_checker_reads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    runs = [start_probe(tmp_path, index, port) for index in range(2)]
    printed = [run.communicate(timeout=30)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    documents = [
        json.loads(line.removeprefix("PROBE "))
        for text in printed
        for line in text.splitlines()
        if line.startswith("PROBE ")
    ]
    kept = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outputs-*/probe-*.json"))]
    assert kept == sorted(documents, key=lambda one: (one["index"], one["local"]))
    job = Job(documents, slots=(2, 2), gpus=(0, 0), spread=False, files=("mine.txt",))
    # What this process gave the probe of its own is not a job's.
    own = (": oom_score_adj is", ": nice is", ": blocked_signals is", ": umask is")
    assert [text for text in violations([job]) if not any(part in text for part in own)] == []


def start_probe(folder: Path, index: int, port: int) -> subprocess.Popen[str]:
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
    }
    return subprocess.Popen(
        [sys.executable, str(PROBE)],
        env=env,
        cwd=folder / "code",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
