"""The plans of mpi and horovod jobs: hosts and slots, files, stages, and what is carried to whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycontrol import equipment, gatekeeper, specfaults, sshsession, standin
from raycontrol.backends import local_environment, make_plan, plan_of, world
from raycontrol.errors import SpecError
from raycontrol.plan import (
    Alive,
    Brief,
    Facts,
    Plan,
    PlannedRun,
    ServesSsh,
    SshAnswers,
    TcpReachable,
    orders,
    render,
    to_json,
)
from raycontrol.spec import Group, GroupResources, JobSpec, Mode, Placement, RunOn

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")


def facts(instance: str, ip: str, *gpus: str, **changes: object) -> Facts:
    return Facts(
        instance=instance,
        ip=ip,
        node_name=f"host-{ip[-1]}",
        ports={"probe": "40001", "master": "40002", "ssh": "2200" + instance[-1]},
        gpus=gpus,
        code_dir="/scratch/code",
        output_dir=f"/scratch/outputs/{instance}",
        private_dir=f"/scratch/runs/{instance}",
        python="/venv/bin/python",
        package_dir="/venv/raycontrol",
        login_key=f"ssh-ed25519 LOGIN-{instance}",
        host_key=f"ssh-ed25519 HOST-{instance}",
        **{"interface": "eth0", "network": "10.0.0.0/24", **changes},  # type: ignore[arg-type]
    )


GANG = (facts("launcher-0", "10.0.0.1"), facts("worker-0", "10.0.0.2"), facts("worker-1", "10.0.0.3"))
PACKED = (
    facts("launcher-0", "10.0.0.1", "0"),
    facts("worker-0", "10.0.0.1", "1", "2"),
    facts("worker-1", "10.0.0.2", "0", "1"),
)


def plan(gang: tuple[Facts, ...] = GANG, **fields: object) -> Plan:
    spec = {"name": "digits", "mode": Mode.MPI, "command": "mpirun train", "nodes": len(gang), **fields}
    return make_plan(JobSpec(**spec), BRIEF, gang)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["mpi", "horovod"])
def test_the_plan_of_the_config(mode: str) -> None:
    expected = json.loads((HERE / "plans" / f"{mode}-job.json").read_text())
    made = plan_of(JobSpec.from_yaml(CONFIGS / mode / "job.yaml"))
    assert json.loads(json.dumps(to_json(made))) == expected


# Where the start command runs.


def test_on_every_instance_the_launcher_is_one_call_of_all() -> None:
    made = plan()
    assert made.stages[-1].runs == {
        name: (PlannedRun("start", "mpirun train"),) for name in ("launcher-0", "worker-0", "worker-1")
    }
    assert made.deciders == {"launcher-0", "worker-0", "worker-1"}
    assert made.meeting == orders(made, 2, "worker-0").meeting == ("launcher-0", "worker-0", "worker-1")
    assert "MPI launchers are one call of launcher-0, worker-0, worker-1" in render(made)


def test_on_the_launcher_the_others_serve() -> None:
    made = plan(run_on=RunOn.LAUNCHER)
    assert made.stages[-1].runs == {"launcher-0": (PlannedRun("start", "mpirun train"),)}
    assert (made.deciders, made.meeting) == ({"launcher-0"}, ("launcher-0",))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("./train | tee log", ("bash", "-o", "pipefail", "-c", "./train | tee log")),
        (("./train", "$HOME"), ("./train", "$HOME")),
    ],
)
def test_as_ranks_the_command_is_what_mpirun_starts(command: object, words: tuple[str, ...]) -> None:
    made = plan(run_on=RunOn.RANKS, command=command, slots=2, cwd="src")
    (run,) = made.stages[-1].runs["launcher-0"]
    assert run == PlannedRun("start", ("mpirun", "-n", "6", *words), cwd="src")
    assert made.deciders == {"launcher-0"}


def test_horovod_runs_on_the_launcher() -> None:
    made = plan(mode=Mode.HOROVOD, command="horovodrun train")
    assert made.stages[-1].runs == {"launcher-0": (PlannedRun("start", "horovodrun train"),)}
    assert json.loads(made.files["worker-0"]["standin.json"])["run_on"] == "launcher"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"mode": "ddp", "run_on": "ranks"}, 'run_on: is for mode mpi only, not ddp, got "ranks"'),
        (
            {"mode": "horovod", "run_on": "ranks"},
            "run_on: mode horovod always runs the command on the launcher",
        ),
        (
            {"mode": "mpi", "run_on": "ranks", "command": "/opt/bin/mpirun -n 2 x"},
            "command: calls an MPI launcher, but with `run_on: ranks` it is the ranks",
        ),
        ({"mode": "mpi", "run_on": "workers"}, "run_on: must be one of every_instance, launcher, ranks"),
        (
            {"mode": "horovod", "groups": {"launcher": {}, "worker": {"command": "x"}}},
            "groups.worker.command: would never run: only the launcher's does in mode horovod",
        ),
        (
            {"mode": "mpi", "run_on": "launcher", "groups": {"launcher": {}, "worker": {"command": "x"}}},
            "groups.worker.command: would never run: only the launcher's does with `run_on: launcher`",
        ),
    ],
)
def test_what_could_not_be_meant_is_refused(fields: dict[str, object], fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.model_validate({"command": "go", **fields})
    assert str(caught.value).startswith(fault)


# Stages.


def test_ssh_is_served_and_proved_both_ways_before_anything_starts() -> None:
    serve, prove, _ = plan().stages
    assert serve.until == (ServesSsh("launcher-0"), ServesSsh("worker-0"), ServesSsh("worker-1"))
    assert prove.until == (
        SshAnswers("launcher-0", "worker-0"),
        SshAnswers("launcher-0", "worker-1"),
        SshAnswers("worker-0", "launcher-0"),
        SshAnswers("worker-1", "launcher-0"),
    )


def test_alone_there_is_nobody_to_reach() -> None:
    assert [stage.name for stage in plan(GANG[:1]).stages] == ["serve ssh", "start"]


def test_a_job_of_another_mode_has_ssh_if_it_asks_for_it() -> None:
    gang = (facts("master-0", "10.0.0.1"), facts("worker-0", "10.0.0.2"))
    made = plan(gang, mode=Mode.DDP, ssh=True, command="torchrun train.py")
    assert [stage.name for stage in made.stages] == ["prove the network", "serve ssh", "prove ssh", "start"]
    assert [type(stage.until[0]) for stage in made.stages] == [TcpReachable, ServesSsh, SshAnswers, Alive]
    assert sorted(made.files["master-0"]) == [
        *("bin/scp", "bin/sftp", "bin/ssh", "ssh/authorized_keys", "ssh/config", "ssh/hosts.json"),
        *("ssh/known_hosts", "ssh/ports"),
    ]


# Hosts and slots.


def test_hosts_and_slots_say_the_same_everywhere() -> None:
    made = plan(
        nodes=None,
        groups={"launcher": Group(slots=1), "worker": Group(slots=3, count=2)},
    )
    for name in made.environment:
        assert made.environment[name]["NODE_IP_SLOT_LIST"] == "10.0.0.1:1,10.0.0.2:3,10.0.0.3:3"
        assert made.files[name]["hostfile"] == "10.0.0.1 slots=1\n10.0.0.2 slots=3\n10.0.0.3 slots=3\n"
        assert made.files[name]["hostfile.hydra"] == "10.0.0.1:1\n10.0.0.2:3\n10.0.0.3:3\n"


def test_instances_of_one_node_are_one_host_whose_ranks_run_in_the_first() -> None:
    made = plan(
        PACKED,
        nodes=None,
        placement=Placement.PACK,
        groups={
            "launcher": Group(resources=GroupResources(gpu=1)),
            "worker": Group(count=2, resources=GroupResources(gpu=2)),
        },
    )
    assert made.environment["worker-0"]["NODE_IP_SLOT_LIST"] == "10.0.0.1:3,10.0.0.2:2"
    assert made.environment["worker-0"]["NODE_LIST"] == "10.0.0.1:1,10.0.0.1:2,10.0.0.2:2"
    gpus = {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in made.environment.items()}
    assert gpus == {"launcher-0": "0,1,2", "worker-0": "1,2", "worker-1": "0,1"}
    hosts = json.loads(made.files["worker-1"]["ssh/hosts.json"])
    assert {name: host["alias"] for name, host in hosts.items()} == {
        "launcher-0": "launcher-0",
        "host-1": "launcher-0",
        "10.0.0.1": "launcher-0",
        "worker-0": "worker-0",
        "worker-1": "worker-1",
        "host-2": "worker-1",
        "10.0.0.2": "worker-1",
    }
    assert made.warnings[0].startswith("instances that come to share a node are one MPI host")


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "eth0"),
        ({"interface": "ens3"}, "10.0.0.0/24"),
        ({"interface": "ens3", "network": "10.0.1.0/24"}, None),
        ({"interface": None, "network": None}, None),
    ],
)
def test_the_network_is_named_in_a_way_that_is_right_on_every_node(
    changes: dict[str, object], chosen: str | None
) -> None:
    made = plan((GANG[0], facts("worker-0", "10.0.0.2", **changes)))  # type: ignore[arg-type]
    for name in ("launcher-0", "worker-0"):
        for variable in ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include"):
            assert made.environment[name].get(variable) == chosen


def test_over_ipv6_addresses_are_bracketed_and_pmix_stays_on_the_node() -> None:
    made = plan(
        (
            facts("launcher-0", "fd00::1", network="fd00::/64"),
            facts("worker-0", "fd00::2", network="fd00::/64"),
        )
    )
    found = made.environment["worker-0"]
    assert found["NODE_IP_SLOT_LIST"] == "[fd00::1]:1,[fd00::2]:1"
    assert made.files["launcher-0"]["hostfile"] == "fd00::1 slots=1\nfd00::2 slots=1\n"
    assert made.files["launcher-0"]["hostfile.hydra"] == "[fd00::1]:1\n[fd00::2]:1\n"
    assert (found["OMPI_MCA_btl_tcp_if_include"], found["PMIX_MCA_ptl_tcp_if_include"]) == ("eth0", "lo")


def test_what_the_user_sets_wins() -> None:
    env = {"PRTE_MCA_hwloc_default_binding_policy": "core", "OMPI_MCA_btl_tcp_if_include": "ib0"}
    made = plan(env=env)
    assert env.items() <= made.environment["worker-1"].items()


@pytest.mark.parametrize("root", [True, False])
def test_root_is_allowed_where_it_is_root(root: bool) -> None:
    made = plan((facts("launcher-0", "10.0.0.1", root=root),))
    allowed = [name for name in made.environment["launcher-0"] if "ALLOW_RUN_AS_ROOT" in name]
    assert len(allowed) == (4 if root else 0)


# What must not be carried from the launcher to the others.


def test_names_that_are_an_instances_own_are_hidden() -> None:
    made = plan(
        nodes=None,
        env={"LEARNING_RATE": "0.1", "SEED": "1"},
        groups={"launcher": Group(), "worker": Group(count=2, env={"SEED": "2"})},
    )
    hidden = json.loads(made.files["launcher-0"]["standin.json"])["hidden"]
    assert {"INDEX", "RAYCONTROL_INSTANCE", "HYDRA_HOST_FILE", "SEED"} <= set(hidden)
    assert not {"LEARNING_RATE", "OMPI_MCA_coll_han_priority", "PYTHONUNBUFFERED"} & set(hidden)


def test_the_environment_for_this_machine_names_nothing_that_only_a_job_has() -> None:
    environment = local_environment(Mode.MPI)
    assert world.AGENT not in environment.values()
    assert not any(value.startswith("/") for value in environment.values())


def test_no_private_key_is_in_a_plan() -> None:
    text = json.dumps(to_json(plan()))
    assert "LOGIN-worker-0" in text and "PRIVATE KEY" not in text


def test_files_go_to_an_instance_once_and_long_ones_are_the_same_text_for_all() -> None:
    made = plan()
    assert orders(made, 0, "worker-0").files == made.files["worker-0"]
    assert orders(made, 1, "worker-0").files == {}
    for path in ("ssh/config", "ssh/known_hosts", "ssh/hosts.json", "ssh/ports", "hostfile"):
        assert len({id(files[path]) for files in made.files.values()}) == 1


def test_programs_and_product_mean_the_same_names() -> None:
    """Stand-ins are programs that import nothing of ours."""
    for path in (standin.SETTINGS_FILE, f"bin/{world.AGENT}"):
        assert path in plan().files["launcher-0"]
    assert f" {standin.AGENT} " in plan().files["launcher-0"][f"bin/{world.AGENT}"]
    assert (standin.BROKEN, standin.SOCKET_FILE) == (world.BROKEN, gatekeeper.SOCKET)
    assert (standin.ENVIRONMENT_FILE, standin.WORLD) == (equipment.ENVIRONMENT_FILE, sshsession.WORLD)
    for name in ("API_TOKEN", "MyKey", "passwd", "secrets", "CREDENTIALS", "HOME"):
        assert standin.looks_secret(name) == specfaults.is_secret_name(name)
