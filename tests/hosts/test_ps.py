"""TensorFlow jobs over three hosts: parameter servers in both styles, mirrored workers, an evaluator; and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran, accuracy, succeeded
from tests.hosts.network import REPOSITORY
from tests.support import wait_until

UP_S = 60
TWO_A_HOST: dict[str, Any] = {"placement": "pack", "resources": {"cpu": 2}}
STAYS = "exec sleep 1000"
QUICK = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
"""Without Keras, which these programs do not use, TensorFlow is imported in three quarters of the time."""


def spec_file(cluster: Cluster, name: str, **fields: Any) -> Path:
    """The file of a ps job with these fields."""
    path = cluster.hosts.shared / f"{name}.json"
    path.write_text(json.dumps({"mode": "ps", "timeouts": {"grace_s": 10}, "env": QUICK, **fields}))
    return path


# Programs that train.


def test_parameter_servers_of_tensorflow_2(cluster: Cluster) -> None:
    config = REPOSITORY / "configs" / "ps" / "job.yaml"
    ran = succeeded(cluster, 1, config, "--set", "resources.cpu=2", "--set", "timeouts.grace_s=10")
    assert accuracy(ran.told) >= 0.9
    found = {item["name"]: item for item in ran.info["instances"]}
    assert len({item["ip"] for item in found.values()}) == 3
    assert found["chief-0"]["exit_code"] == 0
    for name in ("ps-0", "ps-1", "worker-0", "worker-1"):
        assert found[name]["signal"] is not None or found[name]["exit_code"] not in (0, None), found[name]
    assert any(Path(ran.info["outputs"]).glob("chief-0/model*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "groups", "codes"),
    [
        pytest.param(
            "ps_tf1.py", {"ps": {}, "worker": {"count": 2}}, [0, 0], id="TensorFlow 1, asynchronous"
        ),
        pytest.param(
            "ps_mirrored.py", {"ps": {"count": 0}, "worker": {"count": 3}}, [0, 0, 0], id="mirrored"
        ),
    ],
)
def test_where_there_is_no_chief_the_workers_decide(
    cluster: Cluster, program: str, groups: dict[str, Any], codes: list[int]
) -> None:
    spec = spec_file(
        cluster, "no-chief", groups=groups, working_dir=str(PROGRAMS), command=f"python {program}"
    )
    ran = succeeded(cluster, 0, spec)
    assert accuracy(ran.told) >= 0.9
    assert [item["exit_code"] for item in ran.info["instances"] if item["role"] == "worker"] == codes


@pytest.mark.long
def test_an_evaluator_has_time_for_its_last_round(cluster: Cluster) -> None:
    folder = cluster.hosts.shared / "checkpoints-of-ps"
    ran = succeeded(
        cluster,
        0,
        spec_file(
            cluster,
            "evaluated",
            groups={"chief": {}, "worker": {}, "ps": {}, "evaluator": {}},
            working_dir=str(PROGRAMS),
            command=f"python ps_evaluated.py {folder}",
            **TWO_A_HOST,
        ),
    )
    (last,) = re.findall(
        r"last evaluation of step \d+: accuracy ([\d.]+)", "\n".join(ran.lines("evaluator-0"))
    )
    assert float(last) >= 0.9
    kinds = [(event["kind"], event["instance"]) for event in jobs.events(cluster, ran)]
    exits = [instance for kind, instance in kinds if kind == "RunExited"]
    assert exits[0] == "chief-0" and "evaluator-0" in exits
    assert next(item for item in ran.info["instances"] if item["name"] == "evaluator-0")["exit_code"] == 0


# Endings. What the programs compute does not matter here, and they start at once.


def roles_do(cluster: Cluster, name: str, **commands: str) -> Path:
    """A job with one instance of each role, each of which does its own; a marker file shows that it is up."""
    groups = {
        role: {"command": f"touch {up(cluster, name, role)}; {line}"} for role, line in commands.items()
    }
    return spec_file(cluster, name, groups=groups, command="true", **TWO_A_HOST)


def up(cluster: Cluster, name: str, role: str) -> Path:
    return cluster.hosts.shared / f"{name}-{role}.up"


def all_up(cluster: Cluster, name: str, *roles: str) -> str:
    """A shell line that ends when all of these roles are up."""
    return "; ".join(f"until [ -e {up(cluster, name, role)} ]; do sleep 0.05; done" for role in roles)


def sleeping(cluster: Cluster, seconds: int) -> list[tuple[int, str]]:
    """Host and pid of every `sleep` of so many seconds."""
    return [
        (i, pid)
        for i in range(3)
        for pid in cluster.hosts.run(i, ["pgrep", "-f", f"^sleep {seconds}$"]).stdout.split()
    ]


def ends(ran: Ran) -> dict[str, int | str | None]:
    """How each instance ended: its code, or ``signal 15``."""
    return {
        item["name"]: item["exit_code"] if item["signal"] is None else f"signal {item['signal']}"
        for item in ran.info["instances"]
    }


def test_a_worker_that_exits_1_fails_the_attempt(cluster: Cluster) -> None:
    others = all_up(cluster, "w1", "ps", "chief")
    spec = roles_do(cluster, "w1", ps=STAYS, worker=f"{others}; exit 1", chief=STAYS)
    ran = jobs.run(cluster, 0, spec)
    assert (ran.status, ran.info["reason"], ran.info["verdict"]["instance"]) == (
        1,
        "INSTANCE_FAILED",
        "worker-0",
    )
    assert ends(ran) == {"chief-0": "signal 15", "ps-0": "signal 15", "worker-0": 1}


def test_a_chief_that_fails_ends_the_rest(cluster: Cluster) -> None:
    others = all_up(cluster, "c3", "ps", "worker")
    spec = roles_do(cluster, "c3", ps=STAYS, worker=STAYS, chief=f"{others}; echo no labels; exit 3")
    ran = jobs.run(cluster, 0, spec)
    assert (ran.status, ran.info["verdict"]["instance"]) == (3, "chief-0")
    assert ran.info["verdict"]["last_lines"] == ["no labels"]
    assert ends(ran) == {"chief-0": 3, "ps-0": "signal 15", "worker-0": "signal 15"}


def test_a_chief_that_finishes_first_ends_the_job(cluster: Cluster) -> None:
    others = all_up(cluster, "c0", "ps", "worker")
    ran = succeeded(cluster, 0, roles_do(cluster, "c0", ps=STAYS, worker=STAYS, chief=others))
    assert ends(ran) == {"chief-0": 0, "ps-0": "signal 15", "worker-0": "signal 15"}


def test_a_parameter_server_that_is_killed_fails_the_job_and_the_chief_can_save_its_work(
    cluster: Cluster,
) -> None:
    saves = "trap 'echo saved; exit 0' TERM; sleep 1002 & wait"
    spec = roles_do(cluster, "ps9", ps="exec sleep 1001", worker=STAYS, chief=saves)
    process = jobs.start(cluster, 0, spec)
    wait_until(
        lambda: sleeping(cluster, 1001) and sleeping(cluster, 1002), UP_S, "the server and the chief are up"
    )
    ((host, pid),) = sleeping(cluster, 1001)
    cluster.hosts.run(host, ["kill", "-9", pid], check=True)
    ran = jobs.ended(process)
    assert (ran.status, ran.info["verdict"]["instance"]) == (137, "ps-0")
    assert ran.lines("chief-0") == ["saved"]


@pytest.mark.long
def test_a_parameter_server_that_leaves_early_fails_the_job(cluster: Cluster) -> None:
    ran = jobs.run(cluster, 0, roles_do(cluster, "ps0", ps="exit 0", worker=STAYS))
    assert (ran.status, ran.info["verdict"]["summary"].partition(" on ")[0]) == (125, "ps-0")
    assert "exited 0 before the job's work was done" in ran.info["verdict"]["summary"]


def test_success_of_all_waits_for_every_instance(cluster: Cluster) -> None:
    """TI-ONE's rule: the chief does not decide, and a parameter server has to end by itself."""
    late = f"{all_up(cluster, 'all', 'chief')}; sleep 1; echo late; exit 0"
    spec = roles_do(cluster, "all", ps=late, worker="true", chief="true")
    ran = succeeded(cluster, 0, spec, "--set", "success=all")
    assert ends(ran) == {"chief-0": 0, "ps-0": 0, "worker-0": 0}
    assert ran.lines("ps-0") == ["late"]


def test_logs_of_one_group(cluster: Cluster) -> None:
    said = "; ".join(
        f"until [ -e {cluster.hosts.shared}/said-ps-{number} ]; do sleep 0.05; done" for number in range(2)
    )
    spec = spec_file(
        cluster,
        "groups",
        command=f"echo I am $RAYCONTROL_INSTANCE; touch {cluster.hosts.shared}/said-$RAYCONTROL_INSTANCE; {STAYS}",
        groups={"ps": {"count": 2}, "worker": {"count": 2, "command": f"echo I am one; {said}"}},
        **TWO_A_HOST,
    )
    ran = succeeded(cluster, 0, spec)
    told = cluster.raycontrol(1, "logs", ran.info["id"], "--group", "ps", check=True).stdout
    assert sorted(told.splitlines()) == ["ps-0 | I am ps-0", "ps-1 | I am ps-1"]
    refused = cluster.raycontrol(1, "logs", ran.info["id"], "--group", "chief")
    assert (refused.returncode, "has no group 'chief'; it has worker, ps" in refused.stderr) == (2, True)
