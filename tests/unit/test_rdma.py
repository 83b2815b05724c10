"""RDMA: when it is on, which variables it brings, what is said when something is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol import presets
from raycontrol.backends import make_plan, plan_of
from raycontrol.errors import PlanError, SpecError
from raycontrol.hardware import Essentials, Gid, Hca, roce_index
from raycontrol.plan import Brief, Facts, Plan, RdmaUse, render
from raycontrol.rdma import chosen_by
from raycontrol.spec import JobSpec, Resources, Site, members

BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")
ROCE = Hca("mlx5_bond_0", 1, up=True, link_layer="Ethernet", provider=True, gid_index=3)
NODE = Essentials(gpus=8, interfaces=("lo", "eth0", "docker0"), verbs=True, hcas=(ROCE,))
IB_NODE = replace(
    NODE,
    hcas=(
        Hca("mlx5_0", 1, up=True, link_layer="InfiniBand", provider=True),
        Hca("mlx5_1", 1, up=True, link_layer="InfiniBand", provider=True),
        Hca("mlx5_2", 1, up=True, link_layer="Ethernet", provider=True, gid_index=3),
    ),
)
HCC = {
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_IB_SL": "3",
    "NCCL_CHECK_DISABLE": "1",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_LL_THRESHOLD": "16384",
    "NCCL_IB_CUDA_SUPPORT": "1",
    "NCCL_IB_HCA": "mlx5_bond",
    "NCCL_NET_GDR_LEVEL": "2",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
    "NCCL_IB_TC": "160",
    "NCCL_PXN_DISABLE": "1",
    "NCCL_IB_TIMEOUT": "24",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "TCCL_TOPO_AFFINITY": "4",
}
NO_RDMA = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}


def job(**fields: Any) -> JobSpec:
    return JobSpec(**{"command": "torchrun train.py", "nodes": 2, "resources": Resources(gpu=8), **fields})


def planned(spec: JobSpec, *nodes: Essentials) -> Plan:
    gang = members(spec)
    hardware = nodes or (NODE,) * len(gang)
    facts = tuple(
        Facts(
            instance=member.name,
            ip=f"10.0.0.{member.index + 1}",
            node_name=f"host-{member.index + 1}",
            ports={"probe": "40001", "master": "40002"},
            gpus=tuple(map(str, range(int(member.resources.gpu)))),
            interface="eth0",
            hardware=hardware[member.index],
        )
        for member in gang
    )
    return make_plan(spec, BRIEF, facts)


def network(plan: Plan, instance: str = "worker-0") -> dict[str, str | None]:
    environment = plan.environment[instance]
    return {
        name: environment[name] for name in environment if name.startswith(("NCCL_", "GLOO_", "TP_", "TCCL_"))
    }


# The presets.


def test_the_preset_hcc_is_what_ti_one_publishes() -> None:
    assert presets.preset("hcc").variables == HCC


def test_hcc_sets_its_seventeen_values_and_nothing_else_of_nccl() -> None:
    plan = planned(job(rdma={"preset": "hcc"}))
    assert network(plan) == {**HCC, "TP_SOCKET_IFNAME": "eth0"}
    assert plan.origins["worker-0"]["NCCL_IB_TC"] == "preset hcc"
    assert plan.origins["worker-0"]["TP_SOCKET_IFNAME"] == "the interface of the node's IP"


def test_auto_fills_in_what_the_nodes_justify() -> None:
    plan = planned(job())
    assert network(plan) == {
        **NO_RDMA,
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "=mlx5_bond_0:1",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert plan.origins["master-0"] == {
        "NCCL_SOCKET_IFNAME": "the interface of the node's IP",
        "GLOO_SOCKET_IFNAME": "the interface of the node's IP",
        "TP_SOCKET_IFNAME": "the interface of the node's IP",
        "NCCL_DEBUG": "preset auto",
        "NCCL_IB_HCA": "the active Ethernet ports",
        "NCCL_IB_GID_INDEX": "RoCE v2 with the node's IPv4",
    }


def test_infiniband_needs_no_gid_index_and_is_not_mixed_with_ethernet() -> None:
    found = network(planned(job(), IB_NODE, IB_NODE))
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "NCCL_IB_GID_INDEX" not in found


def test_every_node_gets_its_own_values() -> None:
    other = replace(NODE, hcas=(replace(ROCE, device="mlx5_7", gid_index=5),))
    plan = planned(job(), NODE, other)
    assert network(plan, "master-0")["NCCL_IB_HCA"] == "=mlx5_bond_0:1"
    assert network(plan, "worker-0")["NCCL_IB_HCA"] == "=mlx5_7:1"
    assert network(plan, "worker-0")["NCCL_IB_GID_INDEX"] == "5"


def test_what_cannot_be_justified_is_left_to_nccl() -> None:
    two_indexes = replace(NODE, hcas=(ROCE, replace(ROCE, device="mlx5_1", gid_index=5)))
    assert "NCCL_IB_GID_INDEX" not in network(planned(job(), two_indexes, two_indexes))
    no_address = replace(NODE, hcas=(replace(ROCE, gid_index=None),))
    assert "NCCL_IB_GID_INDEX" not in network(planned(job(), no_address, no_address))


def test_the_user_wins_over_the_preset_and_the_preset_over_what_was_detected() -> None:
    plan = planned(job(rdma={"preset": "hcc"}, env={"NCCL_IB_TC": "96", "NCCL_SOCKET_IFNAME": "ib0"}))
    assert network(plan)["NCCL_IB_TC"] == "96"
    assert network(plan)["NCCL_SOCKET_IFNAME"] == "ib0"
    assert network(plan)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert plan.origins["worker-0"]["NCCL_IB_TC"] == "the job's env"


def test_null_unsets_a_variable_of_the_preset() -> None:
    plan = planned(job(rdma={"preset": "hcc"}, env={"NCCL_PXN_DISABLE": None}))
    assert network(plan)["NCCL_PXN_DISABLE"] is None
    assert "NCCL_PXN_DISABLE" not in plan.origins["worker-0"]


def test_the_site_chooses_where_the_spec_does_not() -> None:
    site = Site(rdma_preset="hcc", rdma_min_gpus=4, idle_gpu_warn_s=60.0)
    settled = job().settled(site)
    assert (settled.rdma.preset, settled.rdma.min_gpus, settled.timeouts.idle_gpu_warn_s) == ("hcc", 4, 60.0)
    own = job(rdma={"preset": "auto", "min_gpus": 2}).settled(site)
    assert (own.rdma.preset, own.rdma.min_gpus) == ("auto", 2)
    assert own.settled(Site()) == own


# When it is on.


def smaller(**changes: Any) -> tuple[Essentials, Essentials]:
    return NODE, replace(NODE, **changes)


DOWN = replace(ROCE, up=False)


@pytest.mark.parametrize(
    ("fields", "nodes", "why"),
    [
        (
            {"resources": Resources(gpu=7)},
            (NODE, NODE),
            "master-0 on host-1 holds 7 of its 8 GPUs; worker-0 on host-2 holds 7 of its 8 GPUs",
        ),
        (
            {},
            smaller(foreign=("python (pid 4711) on GPU 3",)),
            "on host-2 other programs use the GPUs: python (pid 4711) on GPU 3",
        ),
        ({}, smaller(hcas=()), "host-2 has no RDMA device"),
        ({}, smaller(hcas=(DOWN,)), "host-2 has no active RDMA port: mlx5_bond_0:1"),
        ({}, smaller(verbs=False), "host-2 has no libibverbs (Debian's libibverbs1)"),
        (
            {},
            smaller(hcas=(replace(ROCE, provider=False),)),
            "host-2 has no user-space driver for mlx5_bond_0 (Debian's ibverbs-providers)",
        ),
        (
            {},
            (replace(IB_NODE, hcas=IB_NODE.hcas[:2]), NODE),
            "the nodes have no link layer in common (InfiniBand here, Ethernet there)",
        ),
    ],
)
def test_what_is_missing_keeps_auto_off_and_is_an_error_with_on(
    fields: dict[str, Any], nodes: tuple[Essentials, ...], why: str
) -> None:
    plan = planned(job(rdma={"min_gpus": 1}, **fields), *nodes)
    assert network(plan) == NO_RDMA
    assert plan.notes == (f"RDMA stays off: {why}",)
    with pytest.raises(PlanError) as caught:
        planned(job(rdma="on", **fields), *nodes)
    advice = "(`raycontrol doctor` says what to do; with `rdma: auto` the job goes without)"
    assert str(caught.value) == f"rdma is on, but {why} {advice}"


def test_one_instance_has_no_rdma_and_nothing_is_said_of_it() -> None:
    plan = planned(job(nodes=1))
    assert (network(plan, "master-0"), plan.notes) == (NO_RDMA, ())
    with pytest.raises(SpecError, match="rdma: must not be on for a single instance"):
        job(nodes=1, rdma="on")


def test_instances_that_share_a_node_have_no_rdma() -> None:
    spec = job(resources=Resources(gpu=4), placement="pack")
    gang = members(spec)
    together = tuple(
        Facts(
            member.name, "10.0.0.1", "host-1", {"probe": "1", "master": "2"}, interface="eth0", hardware=NODE
        )
        for member in gang
    )
    assert "2 instances share host-1" in make_plan(spec, BRIEF, together).rdma.missing


def test_a_job_without_gpus_hears_nothing_of_rdma() -> None:
    plan = planned(job(resources=Resources(cpu=1)), replace(NODE, gpus=0), replace(NODE, gpus=0))
    assert (network(plan), plan.notes, plan.rdma.use) == (NO_RDMA, (), RdmaUse.OFF)


@pytest.mark.parametrize("gpu", [0, 0.5])
def test_on_without_whole_gpus_is_a_fault_of_the_spec(gpu: float) -> None:
    with pytest.raises(SpecError) as caught:
        job(resources=Resources(gpu=gpu), rdma={"when": "on"})
    assert str(caught.value) == (
        f"rdma.when: must not be on where instances hold no whole GPUs; master has {gpu:g} (`resources.gpu`)"
    )


def test_off_is_off() -> None:
    plan = planned(job(rdma="off"))
    assert (network(plan), plan.notes) == (NO_RDMA, ())


def test_auto_is_for_large_nodes_and_on_for_all() -> None:
    four = replace(NODE, gpus=4)
    plan = planned(job(resources=Resources(gpu=4)), four, four)
    assert plan.notes == ("RDMA stays off: master-0, worker-0 ask for fewer GPUs than `rdma.min_gpus` (8)",)
    assert render(plan_of(job(resources=Resources(gpu=4)))).splitlines()[1] == (
        "RDMA: off, because master-0, worker-0 ask for fewer GPUs than `rdma.min_gpus` (8)"
    )
    assert planned(job(resources=Resources(gpu=4), rdma="on"), four, four).rdma.on
    plan = planned(job(resources=Resources(gpu=4), rdma={"min_gpus": 4}), four, four)
    assert plan.rdma.on


def test_one_port_of_several_that_is_down_is_told_and_not_used() -> None:
    node = replace(NODE, hcas=(ROCE, replace(DOWN, device="mlx5_bond_1")))
    plan = planned(job(), node, node)
    assert network(plan)["NCCL_IB_HCA"] == "=mlx5_bond_0:1"
    assert plan.notes == (
        "RDMA is on (preset auto)",
        "not active: mlx5_bond_1:1 on host-1, mlx5_bond_1:1 on host-2",
    )


def test_little_locked_memory_is_told() -> None:
    plan = planned(job(), NODE, replace(NODE, memlock=8 << 20))
    assert plan.notes[1:] == (
        "locked memory is limited on host-2, and RDMA has to lock its buffers; "
        "`ulimit -l unlimited` before `ray start` lifts that",
    )


def test_of_many_reasons_the_first_are_told() -> None:
    plan = planned(job(nodes=6), *(replace(NODE, verbs=False),) * 6)
    lacks = "has no libibverbs (Debian's libibverbs1)"
    assert plan.notes == (
        f"RDMA stays off: host-1 {lacks}; host-2 {lacks}; host-3 {lacks}; host-4 {lacks}; and 2 more",
    )
    plan = planned(job(nodes=6), *(replace(NODE, hcas=()),) * 6)
    assert plan.notes == ("RDMA stays off: no RDMA device on host-1, host-2, host-3, host-4, and 2 more",)


# Names that a preset takes for granted.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"interfaces": ("lo", "ens1")},
            "preset hcc sets NCCL_SOCKET_IFNAME=eth0, but host-2 has no such network interface (it has lo, ens1); "
            "set NCCL_SOCKET_IFNAME in `env`, or choose another preset",
        ),
        (
            {"hcas": (replace(ROCE, device="mlx5_0"),)},
            "preset hcc sets NCCL_IB_HCA=mlx5_bond, but host-2 has no such active RDMA port (it has mlx5_0:1); "
            "set NCCL_IB_HCA in `env`, or choose another preset",
        ),
    ],
)
def test_a_name_that_a_node_lacks_is_an_error_with_both(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(job(rdma={"preset": "hcc"}), *smaller(**changes))
    assert str(caught.value) == message


def test_a_name_that_the_user_has_replaced_is_not_missed() -> None:
    nodes = smaller(interfaces=("lo", "ens1"))
    env = {"NCCL_SOCKET_IFNAME": "=ens1", "GLOO_SOCKET_IFNAME": "ens1"}
    assert planned(job(rdma={"preset": "hcc"}, env=env), *nodes).rdma.on


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("mlx5_bond", ["mlx5_bond_0:1", "mlx5_bond_1:1"]),
        ("=mlx5_bond", []),
        ("=mlx5_bond_0:1", ["mlx5_bond_0:1"]),
        ("mlx5_0:2", []),
        ("mlx5_0,mlx5_bond_1", ["mlx5_0:1", "mlx5_bond_1:1"]),
        ("^mlx5_bond", ["mlx5_0:1"]),
        ("^=mlx5_0", ["mlx5_bond_0:1", "mlx5_bond_1:1"]),
    ],
)
def test_lists_in_the_notation_of_nccl(pattern: str, chosen: list[str]) -> None:
    assert chosen_by(pattern, ["mlx5_0:1", "mlx5_bond_0:1", "mlx5_bond_1:1"]) == chosen


# Specs and symbolic plans.


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("maybe", 'rdma.when: must be one of auto, on, off, got "maybe"'),
        (True, "rdma: must be auto, on or off, or a mapping, got true"),
        ({"preset": "ib"}, 'rdma.preset: must be one of auto, hcc, got "ib"'),
    ],
)
def test_a_wrong_wish_is_one_clear_error(value: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(rdma=value)
    assert str(caught.value) == message


def test_a_plan_without_nodes_shows_what_on_would_set() -> None:
    found = network(plan_of(job(rdma={"when": "on", "preset": "hcc"})))
    assert found == {**HCC, "TP_SOCKET_IFNAME": "<interface of worker-0>"}
    assert network(plan_of(job(rdma="on")))["NCCL_IB_HCA"] == "<active RDMA ports of worker-0>"
    assert plan_of(job()).rdma.use is RdmaUse.OPEN


# The GID table.


def test_the_gid_index_is_that_of_roce_v2_with_the_nodes_ipv4() -> None:
    table = (
        Gid(index=0, gid="fe80:0000:0000:0000:0a42:a1ff:fe00:0001", type="IB/RoCE v1"),
        Gid(index=1, gid="fe80:0000:0000:0000:0a42:a1ff:fe00:0001", type="RoCE v2"),
        Gid(index=2, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="IB/RoCE v1"),
        Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="RoCE v2"),
    )
    assert roce_index(table, ("10.0.0.5",)) == 3
    assert roce_index(table, ("10.0.0.6", "10.0.0.5")) == 3
    assert roce_index(table, ("10.0.0.6",)) is None
    assert roce_index(table, ("fd00::5",)) is None
    assert roce_index((Gid(index=0, gid="nonsense", type="RoCE v2"),), ("10.0.0.5",)) is None
