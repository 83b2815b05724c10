"""``nodes``, ``node show`` and ``doctor`` on a client without a cluster."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from raycontrol.cli import invoke
from raycontrol.cli.output import Output
from raycontrol.cli.services import Services, this_machine
from raycontrol.hardware import (
    Driver,
    GpuProcess,
    Limit,
    Lookup,
    NodeFacts,
    NodeGroup,
    NodeInfo,
    NodeState,
    OfflineNode,
)
from tests.fake_client import FakeClient
from tests.node_facts import GIB, cpu_facts, gpu, gpu_facts, node, roce_port

ADDRESS = "10.0.0.1:6379"


@dataclass
class Shell:
    """Runs command lines against these nodes, or on a machine without a cluster (``address`` None)."""

    nodes: list[NodeInfo] = field(default_factory=list)
    address: str | None = ADDRESS
    alone: NodeInfo = field(default_factory=lambda: node("laptop", cpu_facts(), total={}))
    client: FakeClient = field(default_factory=FakeClient)
    stdout: str = ""
    stderr: str = ""

    def __call__(self, *arguments: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        self.client.known_nodes = self.nodes
        services = Services(
            Output(out, err),
            self.client,  # type: ignore[arg-type]
            lambda explicit: explicit or self.address,
            lambda: self.alone,
        )
        status = invoke(arguments, services)
        self.stdout, self.stderr = out.getvalue(), err.getvalue()
        return status

    def json(self, *arguments: str) -> Any:
        self(*arguments, "--json")
        return json.loads(self.stdout)


def head() -> NodeInfo:
    return node("host-a", cpu_facts(), head=True, id="abcd1234")


def worker(facts: NodeFacts | None = None, **changes: Any) -> NodeInfo:
    """A node with two GPUs, one of them and half of the CPUs taken by two jobs."""
    values = {
        "ip": "10.0.0.6",
        "id": "beef5678",
        "free": {"CPU": 8.0, "GPU": 1.0, "memory": 24.0 * GIB},
        "jobs": ("digits-ab12cd", "mnist-xy34zz"),
        "labels": {"rack": "7"},
    }
    return node("host-b", facts or gpu_facts(), **{**values, **changes})


# nodes


def test_nodes_is_a_table_of_what_is_free_and_who_is_there() -> None:
    silent = node("host-c", ip="10.0.0.7", silent="did not answer within 10 s", total={"CPU": 4.0}, free={})
    shell = Shell([head(), worker(), silent])
    assert shell("nodes") == 0
    assert shell.stdout.splitlines() == [
        "NAME    IP        STATE   CPU    GPU              MEMORY     RDMA  GROUPS  JOBS                         NOTE",
        "host-a  10.0.0.5  online  16/16                   48/48 GiB                                             head",
        "host-b  10.0.0.6  online  8/16   1/2 NVIDIA H100  24/48 GiB  2/2           digits-ab12cd, mnist-xy34zz",
        "host-c  10.0.0.7  online  0/4"
        "                                                                           did not answer within 10 s",
    ]
    assert shell.client.calls == [("client", (None, False)), ("nodes", (None, False)), ("close", None)]


def test_nodes_tells_of_a_driver_that_does_not_answer_and_cuts_many_jobs_short() -> None:
    broken = cpu_facts(driver=Driver(problem="driver/library mismatch"))
    shell = Shell([node("host-a", broken, jobs=("a-1", "b-2", "c-3", "d-4"))])
    assert shell("nodes") == 0
    assert "a-1, b-2, c-3 and 1 more  driver/library mismatch" in shell.stdout


def test_nodes_as_json_are_the_nodes() -> None:
    assert Shell([head(), worker()]).json("nodes") == [
        head().model_dump(mode="json"),
        worker().model_dump(mode="json"),
    ]


# node show


def test_node_show_tells_everything_in_sections() -> None:
    stranger = GpuProcess(pid=8, name="jupyter")
    ours = GpuProcess(pid=9, name="python", attempt_id="digits-ab12cd.0")
    facts = gpu_facts(
        gpus=(gpu(0, numa=0, processes=(stranger, ours)), gpu(1, mig=True)),
        rdma=(roce_port("mlx5_0", rate="200 Gb/sec", interfaces=("eth0",)),),
        open_files=Limit(soft=1024, hard=-1),
        clock_offset_s=0.0214,
        lookups=(Lookup(ip="10.0.0.5", seconds=0.01, name="host-a"), Lookup(ip="10.0.0.7", seconds=5)),
    )
    shell = Shell([worker(facts)])
    assert shell("node", "show", "host-b") == 0
    assert shell.client.calls[1] == ("nodes", (["host-b"], True))
    text = shell.stdout
    assert text.startswith(
        "host-b (10.0.0.6)\n"
        "  id      beef5678\n"
        "  state   online\n"
        "  CPUs    8 of 16 free\n"
        "  GPUs    1 of 2 free\n"
        "  memory  24 of 48 GiB free\n"
        "  labels  rack=7\n"
        "  jobs    digits-ab12cd, mnist-xy34zz\n"
        "machine\n"
        "  hostname   host-a\n"
        "  kernel     5.15.0-91-generic\n"
        "  cores      16, NUMA nodes: 1\n"
        "  memory     64 GiB\n"
        "  /dev/shm   32 GiB\n"
        "  scratch    /tmp/ray/session/raycontrol, 200 GiB free\n"
    )
    assert text.endswith(
        "GPUs\n"
        "  driver   550.54.14\n"
        "  library  550.54.14\n"
        "  CUDA     up to 12.4\n"
        "  GPU 0    NVIDIA H100, 80 GiB, GPU-0, 0000:01:00.0, NUMA node 0, 0 uncorrected memory errors, "
        "used by jupyter (pid 8, not of raycontrol), python (pid 9, digits-ab12cd.0)\n"
        "  GPU 1    NVIDIA H100, 80 GiB, GPU-1, 0000:02:00.0, MIG, 0 uncorrected memory errors\n"
        "network\n"
        "  lo    up, 127.0.0.1/8\n"
        "  eth0  up, 25 Gbit/s, 10.0.0.5/24, Ray's\n"
        "RDMA\n"
        "  libibverbs  /usr/lib/x86_64-linux-gnu/libibverbs.so.1\n"
        "  GPUDirect   nvidia_peermem\n"
        "  mlx5_0:1    ACTIVE, Ethernet, 200 Gb/sec, driver mlx5_core, provider libmlx5, interface eth0, "
        "GIDs: 3 RoCE v2 0000:0000:0000:0000:0000:ffff:0a00:0005\n"
        "software\n"
        "  PyTorch         2.4.0, for CUDA 12.1\n"
        "  nvcc            12.4\n"
        "  compiler        gcc 11.4.0\n"
        "  kernel headers  /usr/src/linux-headers-5.15.0-91-generic\n"
        "limits\n"
        "  open files     1024, may be raised to unlimited\n"
        "  locked memory  unlimited\n"
        "clock and names\n"
        "  ahead of the head  0.021 s\n"
        "  10.0.0.5           host-a, 0.01 s\n"
        "  10.0.0.7           no name, 5.00 s\n"
    )


def test_node_show_says_what_a_node_does_not_have() -> None:
    shell = Shell([node("host-a", cpu_facts(interfaces=()))])
    assert shell("node", "show", "host-a") == 0
    for line in ("GPUs: none", "network: none", "RDMA: none", "  nvcc            none"):
        assert f"{line}\n" in shell.stdout


def test_node_show_of_a_silent_node_is_what_ray_knows() -> None:
    shell = Shell([node("host-a", silent="did not answer within 10 s", id="abcd1234", head=True)])
    assert shell("node", "show", "host-a") == 0
    assert shell.stdout == (
        "host-a (10.0.0.5)\n"
        "  id      abcd1234\n"
        "  head    yes\n"
        "  state   online\n"
        "  CPUs    16 of 16 free\n"
        "  memory  48 of 48 GiB free\n"
        "  silent  did not answer within 10 s\n"
    )


def test_node_show_as_json_is_the_node() -> None:
    assert Shell([worker()]).json("node", "show", "host-b") == worker().model_dump(mode="json")


def test_a_name_that_two_ray_nodes_have_asks_for_the_id() -> None:
    shell = Shell([node("vm", cpu_facts(), id="abcd1234"), node("vm", cpu_facts(), id="beef5678")])
    assert shell("node", "show", "vm") == 2
    assert shell.stderr == (
        "raycontrol: 2 nodes are called 'vm'; give the beginning of an id: abcd1234, beef5678\n"
    )


# doctor


def test_doctor_prints_a_line_per_check_in_the_order_of_nodes() -> None:
    tight = worker(gpu_facts(scratch_free_bytes=2 * GIB))
    shell = Shell([head(), tight])
    assert shell("doctor") == 0
    lines = shell.stdout.splitlines()
    assert len(lines) == 48
    assert [line.split()[0] for line in lines] == ["host-a"] * 24 + ["host-b"] * 24
    assert lines[0] == "host-a  skipped  GPUs on the bus         no NVIDIA device"
    assert lines[25] == "host-b  ok       driver                  550.54.14, runs CUDA up to 12.4"
    assert lines[34] == (
        "host-b  warn     free disk               2 GiB free under /tmp/ray/session/raycontrol: "
        "code, logs and outputs of jobs lie there: make room, or choose another folder with RAYCONTROL_SCRATCH"
    )
    assert shell.stderr == "2 nodes: 28 ok, 1 warning, 19 skipped\n"
    assert shell.client.calls[1] == ("nodes", (None, True))


def test_doctor_exits_with_1_when_a_check_failed() -> None:
    shell = Shell([head(), node("host-b", silent="did not answer within 10 s")])
    assert shell("doctor") == 1
    assert shell.stdout.splitlines()[-1] == (
        "host-b  fail     answer                  did not answer within 10 s: "
        "see `ray status` and the node's raylet.out and raylet.err; then ask again"
    )
    assert shell.stderr == "2 nodes: 7 ok, 1 failed, 17 skipped\n"


def test_doctor_looks_at_the_nodes_that_are_named() -> None:
    shell = Shell([head(), worker(), node("host-c", cpu_facts())])
    assert shell("doctor", "--nodes", "host-c, host-a,") == 0
    assert shell.client.calls[1] == ("nodes", (["host-c", "host-a"], True))
    assert {line.split()[0] for line in shell.stdout.splitlines()} == {"host-a", "host-c"}
    assert shell("doctor", "--nodes", " ,") == 2
    assert shell.stderr == "raycontrol: --nodes: must name a node, got ' ,'\n"


def test_doctor_as_json_is_every_check() -> None:
    found = Shell([head()]).json("doctor")
    assert len(found) == 24
    assert found[10] == {
        "node": "host-a",
        "name": "free disk",
        "verdict": "ok",
        "found": "200 GiB free under /tmp/ray/session/raycontrol",
        "advice": None,
    }


def test_doctor_without_a_cluster_checks_this_machine_and_says_so() -> None:
    shell = Shell([head()], address=None)
    assert shell("doctor") == 0
    assert shell.client.calls == []
    assert {line.split()[0] for line in shell.stdout.splitlines()} == {"laptop"}
    for name in ("GPUs in Ray   ", "Ray's settings"):
        assert f"laptop  skipped  {name}          no Ray was asked\n" in shell.stdout
    assert shell.stderr == (
        "note: no Ray cluster found; checking this machine alone\n1 node: 6 ok, 18 skipped\n"
    )


def test_doctor_without_a_cluster_has_no_nodes_to_choose_from() -> None:
    shell = Shell(address=None)
    assert shell("doctor", "--nodes", "host-a") == 2
    assert shell.stdout == ""
    assert "no Ray cluster found" in shell.stderr


def test_this_machine_is_a_node_by_itself() -> None:
    found = this_machine()
    assert found.facts is not None
    assert (found.id, found.name, found.ip) == ("", found.facts.hostname, found.facts.ip)
    assert found.facts.cores >= 1


@pytest.mark.parametrize("command", ["nodes", "node show", "doctor"])
def test_the_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Shell()(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"  raycontrol {command}" in text
    assert "--json" in text


# Offline nodes and groups.


def test_a_node_is_set_offline_with_a_reason_and_online_again() -> None:
    shell = Shell([head()])
    assert shell("node", "offline", "host-a", "host-x", "--reason", "fan 2") == 0
    assert shell.client.calls[1] == ("set_offline", (["host-a", "host-x"], "fan 2"))
    assert shell.stdout == "host-a offline: fan 2\nhost-x offline: fan 2\n"
    assert shell.stderr == "note: not in the cluster now: host-x\n"
    assert shell("node", "online", "host-a") == 0 and shell.stdout == "host-a online\n"
    (mark,) = shell.json("node", "offline", "host-a", "--reason", "fan")
    assert mark == {"name": "host-a", "reason": "fan", "by": "ada", "at": 1_700_000_000.0, "absent": False}
    assert shell("node", "offline", "host-a") == 2
    assert "give nodes and --reason; --reason is missing" in shell.stderr
    assert shell("node", "offline", "--reason", "fan") == 2
    assert "give nodes and --reason; nodes are missing" in shell.stderr


def test_what_is_offline_is_listed_also_where_it_is_not_in_the_cluster() -> None:
    shell = Shell([head()])
    assert shell("node", "offline") == 0
    assert (shell.stdout, shell.stderr) == ("", "no node is offline\n")
    mark = OfflineNode(name="host-x", reason="fan 2", by="ada", at=1_700_000_000.0, absent=True)
    shell.client.known_offline = [mark]
    assert shell("node", "offline") == 0
    assert shell.stdout.splitlines()[0].split() == ["NAME", "SINCE", "BY", "REASON", "NOTE"]
    assert shell.stdout.splitlines()[1].endswith("ada  fan 2   not in the cluster now")
    assert shell.json("node", "offline") == [mark.model_dump(mode="json")]
    assert shell("nodes") == 0
    assert shell.stderr == (
        "offline, and not in the cluster now: host-x (`raycontrol node offline` says why)\n"
    )


def test_groups_are_made_shown_and_removed() -> None:
    shell = Shell([head()])
    assert shell("node", "group", "add", "train", "host-a", "host-x") == 0
    assert (shell.stdout, shell.stderr) == (
        "train: host-a, host-x\n",
        "note: not in the cluster now: host-x\n",
    )
    shell.client.known_groups = [NodeGroup(name="train", nodes=("host-a", "host-x"), absent=("host-x",))]
    assert shell("node", "group", "list") == 0
    assert shell.stdout.splitlines()[1].split() == ["train", "host-a,", "host-x", "host-x"]
    assert shell.json("node", "group", "list") == [
        {"name": "train", "nodes": ["host-a", "host-x"], "absent": ["host-x"]}
    ]
    assert shell("node", "group", "remove", "train", "host-x") == 0
    assert shell("node", "group", "remove", "train") == 0 and shell.stdout == "train: no nodes\n"
    removed = [call for call in shell.client.calls if call[0] == "remove_from_group"]
    assert [call[1] for call in removed] == [("train", ["host-x"]), ("train", None)]


def test_an_offline_node_is_shown_with_its_state_reason_and_groups() -> None:
    mark = OfflineNode(name="host-a", reason="fan 2", by="ada", at=1_700_000_000.0)
    drained = head().model_copy(
        update={"state": NodeState.DRAINING, "offline": mark, "groups": ("big", "train"), "jobs": ("j-1",)}
    )
    shell = Shell([drained])
    assert shell("nodes") == 0
    assert shell.stdout.splitlines()[1].split()[2] == "draining"
    assert "big, train" in shell.stdout and "fan 2 (ada)" in shell.stdout
    assert shell("node", "show", "host-a") == 0
    assert "draining: fan 2 (ada, " in shell.stdout and "big, train" in shell.stdout
