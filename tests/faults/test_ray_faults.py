"""Ray's own calls fail or come late (``RAY_testing_rpc_failure``, ``RAY_testing_asio_delay_us``) while jobs are placed and
stopped. On this machine alone; each failure may be of the call, which then has not happened, or of its answer."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_state import nothing_left
from tests.ray.conftest import LocalRay

pytestmark = pytest.mark.timeout(600)

STORY_S = 300
OFTEN = {
    "num_failures": 8,
    "num_lower_bound_req_failures": 1,
    "num_lower_bound_resp_failures": 1,
    "req_failure_prob": 15,
    "resp_failure_prob": 15,
}
NODE = "NodeManagerService.grpc_client"
GROUPS = "ray::rpc::PlacementGroupInfoGcsService.grpc_client"
ACTORS = "ray::rpc::ActorInfoGcsService.grpc_client"

FAILING = {
    "placing": (
        f"{NODE}.PrepareBundleResources",
        f"{NODE}.CommitBundleResources",
        f"{NODE}.RequestWorkerLease",
        f"{GROUPS}.CreatePlacementGroup",
        f"{GROUPS}.GetNamedPlacementGroup",
        f"{GROUPS}.WaitPlacementGroupUntilReady",
        f"{ACTORS}.RegisterActor",
        f"{ACTORS}.CreateActor",
    ),
    "stopping": (
        f"{NODE}.RemovePlacementGroupBundles",
        f"{NODE}.ReleaseUnusedBundles",
        f"{NODE}.ReturnWorkerLease",
        f"{GROUPS}.RemovePlacementGroup",
        f"{ACTORS}.KillActorViaGcs",
        f"{ACTORS}.GetNamedActorInfo",
        f"{ACTORS}.ListNamedActors",
        "CoreWorkerService.grpc_client.KillActor",
        "CoreWorkerService.grpc_client.PushTask",
    ),
}
LATE = {
    "NodeManagerService.grpc_server.PrepareBundleResources": "1000000:2000000",
    "NodeManagerService.grpc_server.CommitBundleResources": "200000:1000000",
    "NodeManagerService.grpc_server.RemovePlacementGroupBundles": "200000:1000000",
    "PlacementGroupInfoGcsService.grpc_server.RemovePlacementGroup": "200000:1000000",
    "ActorInfoGcsService.grpc_server.CreateActor": "200000:1000000",
    "ActorInfoGcsService.grpc_server.KillActorViaGcs": "200000:1000000",
    "CoreWorkerService.grpc_server.PushTask": "10000:200000",
}

# Two jobs of each kind, of two instances on this machine, which may all run at once.
STORY = """
import json
from raycontrol import Client, JobSpec
from raycontrol.status import JobState

def spec(name, command):
    return JobSpec(name=name, command=command, nodes=2, placement="pack", resources={"cpu": 0.1})

def reaches(job, *states):
    for event in job.watch():
        if event.state in states:
            return

with Client() as client:
    jobs = []
    for kind, command, when in [
        ("succeeds", "echo done", None),
        ("stopped at once", "sleep 600", JobState.QUEUED),
        ("stopped while placing", "sleep 600", JobState.PLACING),
        ("stopped while running", "sleep 600", JobState.RUNNING),
    ]:
        jobs += [(kind, when, client.submit(spec(kind.replace(" ", "-"), command))) for _ in range(2)]
    for _, when, job in jobs:
        if when is not None:
            reaches(job, when, *(state for state in JobState if state.terminal))
            job.stop()
    print(json.dumps([(kind, job.wait(timeout_s=200).model_dump(mode="json")) for kind, _, job in jobs]))
"""


@pytest.mark.parametrize("calls", FAILING)
def test_calls_of_ray_that_fail_lose_no_job_and_leave_nothing(calls: str, tmp_path: Path) -> None:
    injected = {call: OFTEN for call in FAILING[calls]}
    plays(tmp_path, {"RAY_testing_rpc_failure": json.dumps(injected)}, "Setting RpcFailureManager seed")


def test_calls_of_ray_that_come_late_lose_no_job_and_leave_nothing(tmp_path: Path) -> None:
    injected = ",".join(f"{call}={delay}" for call, delay in LATE.items())
    plays(tmp_path, {"RAY_testing_asio_delay_us": injected}, "RAY_testing_asio_delay_us is set to")


def plays(tmp_path: Path, injected: Mapping[str, str], told: str) -> None:
    """Play the story on a Ray with these faults, in the client too."""
    with closing(LocalRay(Path(tempfile.mkdtemp(prefix="rc-ray-")), tmp_path / "home", injected)) as local:
        local.wait_ready()
        with nothing_left(local):
            ends = story(local, injected)
        logs = (local.folder / "ray/session_latest/logs").glob("gcs_server*")
        assert any(told in log.read_text(errors="replace") for log in logs), "Ray has heard of the faults"
    for kind, info in ends:
        expected = "SUCCEEDED" if kind == "succeeds" else "STOPPED"
        assert info["state"] == expected, json.dumps(info, indent=1)


def story(local: LocalRay, injected: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    process = local.popen([sys.executable, "-c", STORY], env=injected)
    stdout, stderr = process.communicate(timeout=STORY_S)
    assert process.returncode == 0, f"{stdout[-2000:]}\n{stderr[-6000:]}"
    ends: list[tuple[str, dict[str, Any]]] = json.loads(last_list(stdout))
    return ends


def last_list(stdout: str) -> str:
    """The last line that may be JSON: Ray prints lines of its own, before and after."""
    return next(line for line in reversed(stdout.splitlines()) if line.startswith("["))
