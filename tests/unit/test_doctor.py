"""Every check of the doctor: on facts with which all is well, and on facts with which it is not."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol.doctor import RULES, Check, checks, size
from raycontrol.hardware import (
    Driver,
    Gid,
    GpuProcess,
    Interface,
    Limit,
    Lookup,
    NodeFacts,
    NodeInfo,
    RayStart,
    SharedFolder,
)
from raycontrol.raysettings import variables
from tests.node_facts import GIB, cpu_facts, gpu, gpu_facts, node, roce_port


def check(name: str, facts: NodeFacts, *peers: NodeInfo, **changes: Any) -> Check:
    """The check of that name on a node with these facts; ``changes`` are of the node."""
    found = checks(node(facts=facts, **changes), peers)
    return next(item for item in found if item.name == name)


def words(name: str, facts: NodeFacts, *peers: NodeInfo, **changes: Any) -> tuple[str, str]:
    found = check(name, facts, *peers, **changes)
    return found.verdict.value, found.found


# The whole.


def test_a_healthy_gpu_node_passes_every_check() -> None:
    lookups = (Lookup(ip="10.0.0.6", seconds=0.01, name="host-b"),)
    facts = gpu_facts(clock_offset_s=0.02, lookups=lookups, shared=SharedFolder(folder="/mnt/all"))
    peer = node("host-b", gpu_facts(), ip="10.0.0.6")
    assert [(item.name, item.verdict.value, item.found) for item in checks(node(facts=facts), [peer])] == [
        ("GPUs on the bus", "ok", "2 x NVIDIA H100"),
        ("driver", "ok", "550.54.14, runs CUDA up to 12.4"),
        ("GPUs in Ray", "ok", "2, as the driver"),
        ("ECC errors", "ok", "none"),
        ("MIG", "ok", "off"),
        ("other programs on GPUs", "ok", "none"),
        ("kernel headers", "ok", "/usr/src/linux-headers-5.15.0-91-generic"),
        ("compiler", "ok", "gcc 11.4.0"),
        ("CUDA toolkit", "ok", "12.4"),
        ("PyTorch", "ok", "2.4.0, built for CUDA 12.1; the driver runs up to 12.4"),
        ("free disk", "ok", "200 GiB free under /tmp/ray/session/raycontrol"),
        ("shared memory", "ok", "/dev/shm has 32 GiB"),
        ("open files", "ok", "at most 1048576"),
        ("locked memory", "ok", "unlimited"),
        ("Ray's settings", "ok", "as `raycontrol ray-env` prints them"),
        ("network interface", "ok", "eth0 has 10.0.0.5, 25 Gbit/s"),
        ("RDMA ports", "ok", "2 of 2 up (Ethernet)"),
        ("RDMA libraries", "ok", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1 with libmlx5"),
        ("RoCE address", "ok", "mlx5_0:1 at GID index 3, mlx5_1:1 at GID index 3"),
        ("GPUDirect", "ok", "nvidia_peermem is loaded"),
        ("clock", "ok", "0.02 s ahead of the head's"),
        ("name look-ups", "ok", "1 peer, the slowest in 0.01 s"),
        ("shared folder", "ok", "/mnt/all is proved to be the head's"),
        ("same versions", "ok", "driver, PyTorch and kernel as on most of 2 nodes"),
    ]


def test_on_a_node_of_cpus_the_checks_of_gpus_and_rdma_do_not_apply() -> None:
    found = checks(node(facts=cpu_facts()), [])
    assert {(item.name, item.found) for item in found if item.verdict == "skipped"} == {
        ("GPUs on the bus", "no NVIDIA device"),
        ("driver", "no NVIDIA device"),
        ("GPUs in Ray", "no GPU here, and none in Ray"),
        ("ECC errors", "no NVIDIA device"),
        ("MIG", "no NVIDIA device"),
        ("other programs on GPUs", "no NVIDIA device"),
        ("kernel headers", "no NVIDIA device"),
        ("CUDA toolkit", "no NVIDIA device"),
        ("locked memory", "no RDMA device"),
        ("RDMA ports", "no RDMA device"),
        ("RDMA libraries", "no RDMA device"),
        ("RoCE address", "no RDMA device"),
        ("GPUDirect", "no NVIDIA device"),
        ("clock", "not measured"),
        ("name look-ups", "no other node was looked up"),
        ("shared folder", "no shared_dir in the settings"),
        ("same versions", "no other node to compare with"),
    }
    assert {item.verdict.value for item in found} == {"ok", "skipped"}


def test_a_folder_that_is_not_shared_fails_with_nodes_and_users() -> None:
    fault = (
        "shared_dir /mnt/all is not shared by host-a: the head (uid 0) cannot write there: Permission denied"
    )
    found = check("shared folder", cpu_facts(shared=SharedFolder(folder="/mnt/all", fault=fault)))
    assert (found.verdict, found.found) == ("fail", fault)
    assert "docs/shared-folder.md" in (found.advice or "")


def test_a_node_that_did_not_answer_is_one_failing_check() -> None:
    assert checks(node("host-b", silent="did not answer within 10 s"), [node(facts=cpu_facts())]) == (
        Check(
            node="host-b",
            name="answer",
            verdict="fail",
            found="did not answer within 10 s",
            advice="see `ray status` and the node's raylet.out and raylet.err; then ask again",
        ),
    )


def test_checks_come_in_the_order_of_the_table() -> None:
    assert [item.name for item in checks(node(facts=cpu_facts()), [])] == [rule.name for rule in RULES]


# GPUs.


MISMATCH = Driver(version="550.54.14", problem="driver/library mismatch: the kernel module is 550.54.14")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            cpu_facts(driver=Driver(problem="no driver", idle_devices=("0000:01:00.0", "0000:02:00.0"))),
            ("fail", "2 NVIDIA devices without a working driver: 0000:01:00.0, 0000:02:00.0"),
        ),
        (
            gpu_facts(driver=Driver(version="550.54.14", cuda="12.4", idle_devices=("0000:03:00.0",))),
            ("warn", "1 NVIDIA device without a working driver: 0000:03:00.0"),
        ),
        (cpu_facts(driver=MISMATCH), ("ok", "each has a driver in the kernel")),
    ],
)
def test_devices_without_a_driver_are_named(facts: NodeFacts, expected: tuple[str, str]) -> None:
    assert words("GPUs on the bus", facts) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            cpu_facts(driver=MISMATCH),
            ("fail", "driver/library mismatch: the kernel module is 550.54.14"),
        ),
        (
            gpu_facts(gpus=(gpu(0), gpu(1, fault="GPU is lost"))),
            ("fail", "GPU 1 (0000:02:00.0): GPU is lost"),
        ),
        (cpu_facts(driver=Driver(idle_devices=("0000:01:00.0",))), ("fail", "it names no GPU")),
    ],
)
def test_a_driver_that_does_not_answer_fails(facts: NodeFacts, expected: tuple[str, str]) -> None:
    assert words("driver", facts) == expected


@pytest.mark.parametrize(
    ("facts", "total", "expected"),
    [
        (
            cpu_facts(),
            {"GPU": 8},
            ("warn", "Ray counts 8 GPUs, but this node has none: logical GPUs"),
        ),
        (gpu_facts(), {"GPU": 1}, ("warn", "Ray counts 1 GPU, the driver 2")),
        (gpu_facts(), {"CPU": 1}, ("warn", "Ray counts 0 GPUs, the driver 2")),
        (gpu_facts(), {"GPU": 8}, ("fail", "Ray counts 8 GPUs, the driver 2")),
        (
            gpu_facts(gpus=(gpu(0, mig=True), gpu(1))),
            {"GPU": 8},
            ("skipped", "Ray counts 8; with MIG that is not compared"),
        ),
        (gpu_facts(), {}, ("skipped", "no Ray was asked")),
    ],
)
def test_rays_count_of_gpus_is_held_against_the_drivers(
    facts: NodeFacts, total: dict[str, float], expected: tuple[str, str]
) -> None:
    assert words("GPUs in Ray", facts, total=total) == expected


def test_memory_errors_are_told_gpu_by_gpu() -> None:
    bad = gpu_facts(gpus=(gpu(0), gpu(1, ecc_errors=2)))
    assert words("ECC errors", bad) == (
        "warn",
        "uncorrected memory errors since the driver was loaded: GPU 1 has 2",
    )
    consumer = gpu_facts(gpus=(gpu(0, ecc_errors=None),))
    assert words("ECC errors", consumer) == ("skipped", "these GPUs keep no count")


def test_gpus_cut_into_instances_are_a_warning() -> None:
    facts = gpu_facts(gpus=(gpu(0, mig=True), gpu(1)))
    assert words("MIG", facts) == ("warn", "cut into MIG instances: GPU 0")


def test_programs_of_jobs_are_no_strangers_on_a_gpu() -> None:
    ours = GpuProcess(pid=7, name="python", attempt_id="digits-ab12cd.0")
    stranger = GpuProcess(pid=8, name="jupyter")
    assert words("other programs on GPUs", gpu_facts(gpus=(gpu(0, processes=(ours,)),))) == ("ok", "none")
    shared = gpu_facts(gpus=(gpu(0), gpu(1, processes=(ours, stranger))))
    assert words("other programs on GPUs", shared) == ("warn", "jupyter (pid 8) on GPU 1")


def test_checks_of_single_gpus_are_skipped_when_the_driver_names_none() -> None:
    facts = cpu_facts(driver=MISMATCH)
    for name in ("ECC errors", "MIG", "other programs on GPUs"):
        assert words(name, facts) == ("skipped", "the driver names no GPU")


def test_many_findings_are_cut_short() -> None:
    facts = gpu_facts(gpus=tuple(gpu(index, mig=True) for index in range(8)))
    assert check("MIG", facts).found == "cut into MIG instances: GPU 0, GPU 1, GPU 2, GPU 3 and 4 more"


# Software.


@pytest.mark.parametrize(
    ("name", "lacks", "found"),
    [
        ("kernel headers", "headers", "no headers of kernel 5.15.0-91-generic"),
        ("compiler", "compiler", "no C compiler on the PATH"),
        ("CUDA toolkit", "nvcc", "no nvcc"),
        ("PyTorch", "torch", "not in raycontrol's own Python environment"),
        ("PyTorch", "torch_cuda", "2.4.0 is built without CUDA"),
    ],
)
def test_software_that_is_missing_is_a_warning(name: str, lacks: str, found: str) -> None:
    assert words(name, gpu_facts(**{lacks: None})) == ("warn", found)


@pytest.mark.parametrize(
    ("driver_cuda", "built_for", "verdict"),
    [
        ("12.4", "12.4", "ok"),
        ("12.4", "11.8", "ok"),
        ("12.4", "12.8", "ok"),
        ("11.4", "11.8", "ok"),
        ("12.4", "13.0", "fail"),
        ("10.1", "10.2", "fail"),
        ("10.2", "10.1", "ok"),
        (None, "12.4", "ok"),
        ("unknown", "12.4", "ok"),
    ],
)
def test_a_driver_runs_what_is_built_for_its_cuda_and_within_a_major_version(
    driver_cuda: str | None, built_for: str, verdict: str
) -> None:
    facts = gpu_facts(driver=Driver(version="1", cuda=driver_cuda), torch_cuda=built_for)
    assert check("PyTorch", facts).verdict == verdict


def test_a_pytorch_that_is_too_new_for_the_driver_says_what_to_install() -> None:
    found = check("PyTorch", gpu_facts(torch="2.9.0", torch_cuda="13.0"))
    assert found.found == "2.9.0, built for CUDA 13.0, but the driver runs up to 12.4"
    assert found.advice == ("install a newer driver, or a PyTorch that is built for CUDA 12.4 or older")


def test_a_pytorch_for_cpus_is_right_on_a_node_of_cpus() -> None:
    assert words("PyTorch", cpu_facts()) == ("ok", "2.4.0, for CPUs")


# Room and limits.


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [
        (GIB - 1, ("fail", "1024 MiB free under /tmp/ray/session/raycontrol")),
        (5 * GIB - 1, ("warn", "5 GiB free under /tmp/ray/session/raycontrol")),
        (5 * GIB, ("ok", "5 GiB free under /tmp/ray/session/raycontrol")),
    ],
)
def test_a_disk_that_fills_warns_and_one_that_is_full_fails(
    free_bytes: int, expected: tuple[str, str]
) -> None:
    assert words("free disk", cpu_facts(scratch_free_bytes=free_bytes)) == expected


@pytest.mark.parametrize(
    ("shm_bytes", "expected"),
    [
        (64 * 2**20, ("warn", "/dev/shm has 64 MiB")),
        (2 * GIB, ("warn", "/dev/shm has 2 GiB")),
        (4 * GIB, ("ok", "/dev/shm has 4 GiB")),
        (0, ("warn", "/dev/shm has 0 bytes")),
    ],
)
def test_shared_memory_is_at_least_a_gib_and_a_twentieth_of_memory(
    shm_bytes: int, expected: tuple[str, str]
) -> None:
    assert words("shared memory", cpu_facts(shm_bytes=shm_bytes)) == expected


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        (4096, ("warn", "at most 4096")),
        (65_536, ("ok", "at most 65536")),
        (-1, ("ok", "at most any number")),
    ],
)
def test_few_open_files_are_a_warning(hard: int, expected: tuple[str, str]) -> None:
    assert words("open files", cpu_facts(open_files=Limit(soft=1024, hard=hard))) == expected


def test_a_limit_on_locked_memory_matters_where_there_is_rdma() -> None:
    found = check("locked memory", gpu_facts(memlock=Limit(soft=65_536, hard=65_536)))
    assert (found.verdict, found.found) == ("warn", "at most 64 KiB")
    assert found.advice is not None
    assert "`ulimit -l unlimited` before `ray start`" in found.advice
    assert "LimitMEMLOCK=infinity" in found.advice
    assert words("locked memory", gpu_facts(memlock=Limit(soft=65_536, hard=-1))) == ("ok", "unlimited")


# How Ray was started.

NODE, HEAD = variables(head=False), variables(head=True)
IN_MEMORY = "; Ray's tables are in memory only"


def without(names: str, environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names.split()}


@pytest.mark.parametrize(
    ("raylet", "expected"),
    [
        (NODE, ("ok", "as `raycontrol ray-env` prints them")),
        ({}, ("warn", "none of those advised is set")),
        (without("RAY_worker_niceness", NODE), ("warn", "not set: RAY_worker_niceness")),
        (
            {"RAY_grpc_client_keepalive_timeout_ms": "120000"},
            (
                "warn",
                "RAY_grpc_client_keepalive_timeout_ms is 120000, not 16000; "
                "not set: RAY_preload_python_modules, RAY_worker_niceness",
            ),
        ),
        (
            {**NODE, "RAY_preload_python_modules": "torch,numpy"},
            ("warn", "RAY_preload_python_modules is without raycontrol.actors"),
        ),
        (
            {**NODE, "RAY_preload_python_modules": "torch,raycontrol.actors"},
            ("ok", "as `raycontrol ray-env` prints them"),
        ),
    ],
)
def test_settings_that_rays_start_lacked_are_one_line(
    raylet: dict[str, str], expected: tuple[str, str]
) -> None:
    assert words("Ray's settings", cpu_facts(ray=RayStart(raylet=raylet))) == expected


@pytest.mark.parametrize(
    ("gcs", "storage", "expected"),
    [
        (HEAD, "memory", ("ok", f"as `raycontrol ray-env --head` prints them{IN_MEMORY}")),
        (
            HEAD,
            "rocksdb",
            ("ok", "as `raycontrol ray-env --head` prints them; Ray's tables are in RocksDB, on disk"),
        ),
        (HEAD, "redis", ("ok", "as `raycontrol ray-env --head` prints them; Ray's tables are in Redis")),
        (
            {**HEAD, "RAY_health_check_period_ms": "3000"},
            "memory",
            ("warn", f"RAY_health_check_period_ms is 3000, not 1000{IN_MEMORY}"),
        ),
        (
            without("RAY_health_check_timeout_ms RAY_grpc_client_keepalive_timeout_ms", HEAD),
            "memory",
            (
                "warn",
                f"not set: RAY_health_check_timeout_ms, RAY_grpc_client_keepalive_timeout_ms{IN_MEMORY}",
            ),
        ),
    ],
)
def test_on_the_head_those_that_its_gcs_has_are_looked_at_too(
    gcs: dict[str, str], storage: str, expected: tuple[str, str]
) -> None:
    ray = RayStart(raylet=HEAD, gcs=gcs, storage=storage)
    assert words("Ray's settings", cpu_facts(ray=ray), head=True) == expected


def test_the_advice_on_settings_names_the_command_for_the_node() -> None:
    found = check("Ray's settings", cpu_facts(ray=RayStart(gcs={}, storage="memory")), head=True)
    assert found.found == f"none of those advised is set{IN_MEMORY}"
    assert found.advice is not None and "what `raycontrol ray-env --head` prints" in found.advice


def test_settings_are_not_judged_where_no_ray_was_asked_or_its_raylet_cannot_be_read() -> None:
    assert words("Ray's settings", cpu_facts(), total={}) == ("skipped", "no Ray was asked")
    assert words("Ray's settings", cpu_facts(ray=None)) == (
        "skipped",
        "the environment of the node's raylet cannot be read",
    )


# Network and RDMA.


def test_the_interface_of_rays_address_must_be_there_and_up() -> None:
    elsewhere = Interface(name="eth0", up=True, addresses=("192.168.0.2/24",))
    assert words("network interface", cpu_facts(interfaces=(elsewhere,))) == (
        "fail",
        "no interface has 10.0.0.5, by which Ray knows this node",
    )
    down = Interface(name="eth1", up=False, addresses=("10.0.0.5/24",), owns_ray_ip=True)
    found = check("network interface", cpu_facts(interfaces=(elsewhere, down)))
    assert (found.verdict, found.found) == ("fail", "eth1, which has 10.0.0.5, is down")
    assert found.advice == "`ip link set eth1 up`"


def test_rdma_ports_that_are_down_are_named() -> None:
    ports = (roce_port("mlx5_0"), roce_port("mlx5_1", state="DOWN"))
    assert words("RDMA ports", gpu_facts(rdma=ports)) == ("warn", "1 of 2 up; mlx5_1:1 is DOWN")


def test_rdma_needs_its_libraries() -> None:
    found = check("RDMA libraries", gpu_facts(verbs=None))
    assert (found.verdict, found.found) == ("warn", "no libibverbs")
    assert found.advice is not None and "apt install libibverbs1 ibverbs-providers" in found.advice
    bare = gpu_facts(rdma=(roce_port("mlx5_0"), roce_port("bnxt_re0", provider=None)))
    assert words("RDMA libraries", bare) == ("warn", "libibverbs has no provider for bnxt_re0:1")


def test_a_port_over_ethernet_needs_the_nodes_address_in_its_gid_table() -> None:
    old = Gid(index=1, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="IB/RoCE v1")
    other = Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:c0a8:0002", type="RoCE v2")
    ports = (roce_port("mlx5_0"), roce_port("mlx5_1", gids=(old, other)))
    assert words("RoCE address", gpu_facts(rdma=ports)) == (
        "warn",
        "no RoCE v2 address of the node's IPv4 on mlx5_1:1",
    )


@pytest.mark.parametrize(
    "changes", [{"link_layer": "InfiniBand"}, {"state": "DOWN"}], ids=["InfiniBand", "down"]
)
def test_infiniband_and_ports_that_are_down_need_no_roce_address(changes: dict[str, str]) -> None:
    facts = gpu_facts(rdma=(roce_port(gids=(), **changes),))
    assert words("RoCE address", facts) == ("skipped", "no RDMA port over Ethernet is up")


def test_gpudirect_needs_a_module_that_reaches_gpu_memory() -> None:
    assert words("GPUDirect", gpu_facts(gpudirect=("gdrdrv",))) == (
        "warn",
        "no module that lets RDMA devices reach GPU memory",
    )
    assert words("GPUDirect", gpu_facts(gpudirect=("gdrdrv", "nv_peer_mem"))) == (
        "ok",
        "nv_peer_mem is loaded",
    )


# The node among the others.


@pytest.mark.parametrize(
    ("offset_s", "expected"),
    [
        (-0.9, ("ok", "0.90 s behind the head's")),
        (-1.5, ("warn", "1.50 s behind the head's")),
        (31.0, ("fail", "31.00 s ahead of the head's")),
    ],
)
def test_clocks_that_differ_warn_and_then_fail(offset_s: float, expected: tuple[str, str]) -> None:
    assert words("clock", cpu_facts(clock_offset_s=offset_s)) == expected


def test_slow_name_look_ups_say_who_suffers_and_what_to_do() -> None:
    looked_up = (
        Lookup(ip="10.0.0.6", seconds=0.01, name="host-b"),
        Lookup(ip="10.0.0.7", seconds=5.0),
    )
    found = check("name look-ups", cpu_facts(lookups=looked_up))
    assert (found.verdict, found.found) == ("warn", "name look-ups on this node take 5 s (10.0.0.7)")
    assert found.advice == (
        "torch's TCPStore, Ray Train and horovodrun look up every peer; add the peers to /etc/hosts or mend DNS"
    )


def test_a_quick_answer_that_there_is_no_name_is_no_warning() -> None:
    facts = cpu_facts(lookups=(Lookup(ip="10.0.0.6", seconds=0.0),))
    assert words("name look-ups", facts) == ("ok", "1 peer, the slowest in 0.00 s")


def test_the_node_that_differs_is_warned_and_the_majority_named() -> None:
    others = [node(name, gpu_facts()) for name in ("host-b", "host-c")]
    odd = gpu_facts(driver=Driver(version="535.1", cuda="12.4"), torch="2.3.1")
    assert words("same versions", odd, *others) == (
        "warn",
        "driver 535.1, but 550.54.14 on 2 of 3 nodes; PyTorch 2.3.1, but 2.4.0 on 2 of 3 nodes",
    )
    assert words("same versions", gpu_facts(), node("host-b", odd), others[1])[0] == "ok"


def test_of_two_nodes_that_differ_the_one_that_is_not_the_head_is_warned() -> None:
    head = node("zebra", cpu_facts(), head=True)
    other = node("ant", cpu_facts(kernel="6.8.0"))
    found = {info.name: checks(info, [head, other])[-1] for info in (head, other)}
    assert found["zebra"].verdict == "ok"
    assert found["ant"].found == "kernel 6.8.0, but 5.15.0-91-generic on 1 of 2 nodes"


def test_what_a_node_does_not_have_is_not_compared() -> None:
    head_of_cpus = node("head", cpu_facts(torch=None), head=True)
    assert words("same versions", gpu_facts(), head_of_cpus)[0] == "ok"


def test_silent_peers_are_not_compared() -> None:
    assert words("same versions", cpu_facts(), node("host-b", silent="did not answer within 10 s")) == (
        "skipped",
        "no other node to compare with",
    )


# Words.


@pytest.mark.parametrize(
    ("amount_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (65_536, "64 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64 MiB"),
        (3.5 * GIB, "3.5 GiB"),
        (2000 * GIB, "2000 GiB"),
    ],
)
def test_sizes_are_told_in_the_largest_unit_that_they_fill(amount_bytes: float, text: str) -> None:
    assert size(amount_bytes) == text
