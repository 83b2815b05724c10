"""What a node finds out about itself, from generated trees of files and a driver that is not there."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from raycontrol import nvml
from raycontrol.hardware import (
    Driver,
    Gid,
    Gpu,
    GpuProcess,
    Interface,
    NodeFacts,
    RdmaPort,
    essentials,
)
from raycontrol.nodefacts import Installed, collect, installed, torch_versions
from tests.unit import trees
from tests.unit.fake_nvml import GIB, Card, FakeNvml
from tests.unit.trees import (
    LIBRARIES,
    infiniband,
    interface,
    nvidia_device,
    nvidia_driver,
    process,
    verbs,
    write,
)

IP = "10.0.0.5"
OURS = {"RAYCONTROL_ATTEMPT_ID": "train-1.1", "PATH": "/usr/bin"}
NO_LIBRARY = FakeNvml(refuses={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
MISMATCH = FakeNvml(library="12.550.90.07", refuses={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})


def facts(
    root: Path,
    library: FakeNvml = NO_LIBRARY,
    *,
    ip: str = IP,
    environ: dict[str, str] | None = None,
    addresses: dict[str, tuple[str, ...]] | None = None,
) -> NodeFacts:
    """What a node finds whose files are in ``root``."""
    return collect(
        root,
        ip,
        environ=environ or {},
        installed=Installed(),
        root=root,
        gpus=asking(library),
        addresses={"eth0": (f"{IP}/24",)} if addresses is None else addresses,
    )


def asking(library: FakeNvml) -> Callable[[str | None], tuple[Driver, tuple[Gpu, ...]]]:
    return lambda module: nvml.describe(module, library)


def card(number: int, **more: object) -> Card:
    return Card(f"GPU-{number:08x}", bus=0x10 + number, **more)  # type: ignore[arg-type]


# Whole nodes.


def test_a_node_with_eight_gpus_and_eight_cards(tmp_path: Path) -> None:
    trees.dgx(tmp_path, IP)
    found = facts(tmp_path, FakeNvml(*(card(number) for number in range(8))))
    assert (found.kernel, found.numa_nodes, found.gpudirect) == ("5.15.0-105-generic", 2, ("nvidia_peermem",))
    assert found.driver == Driver(version="550.54.14", library="550.54.14", cuda="12.4")
    assert [(gpu.index, gpu.pci, gpu.numa) for gpu in found.gpus] == [
        (0, "0000:10:00.0", 0),
        (1, "0000:11:00.0", 0),
        (2, "0000:12:00.0", 0),
        (3, "0000:13:00.0", 0),
        (4, "0000:14:00.0", 1),
        (5, "0000:15:00.0", 1),
        (6, "0000:16:00.0", 1),
        (7, "0000:17:00.0", 1),
    ]
    assert found.verbs == f"/{LIBRARIES}/libibverbs.so.1"
    assert [port.name for port in found.rdma] == [f"mlx5_{number}:1" for number in range(8)]
    assert found.rdma[0] == RdmaPort(
        device="mlx5_0",
        port=1,
        state="ACTIVE",
        link_layer="InfiniBand",
        rate="200 Gb/sec (4X HDR)",
        gids=(Gid(index=0, gid="fe80:0000:0000:0000:b8ce:f603:00d2:1a0c", type="IB/RoCE v1"),),
        interfaces=("ib0",),
        driver="mlx5_core",
        provider=f"/{LIBRARIES}/libibverbs/libmlx5-rdmav34.so",
    )


def test_a_node_where_nothing_can_be_read(tmp_path: Path) -> None:
    found = facts(tmp_path / "missing", addresses={})
    assert (found.kernel, found.numa_nodes) == (os.uname().release, 1)
    assert (found.driver.version, found.driver.problem, found.driver.idle_devices) == (None, None, ())
    assert (found.gpus, found.interfaces, found.verbs, found.rdma, found.gpudirect) == ((), (), None, (), ())
    assert (found.shm_bytes, found.scratch_free_bytes) == (0, 0)
    assert found.cores >= 1 and found.memory_bytes > 0 and found.open_files.hard != 0


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    found = collect(tmp_path, "127.0.0.1", environ=dict(os.environ), installed=Installed(nvcc="12.4.131"))
    (own,) = [interface for interface in found.interfaces if interface.owns_ray_ip]
    assert own.up and "127.0.0.1/8" in own.addresses
    assert (found.kernel, found.nvcc, found.scratch) == (os.uname().release, "12.4.131", str(tmp_path))
    assert found.scratch_free_bytes > 0
    assert NodeFacts.model_validate_json(found.model_dump_json()) == found


# The driver.


def test_a_driver_that_does_not_fit_its_library_is_a_problem(tmp_path: Path) -> None:
    nvidia_driver(tmp_path, "550.54.14")
    nvidia_device(tmp_path, "0000:10:00.0")
    assert facts(tmp_path, MISMATCH).driver == Driver(
        version="550.54.14",
        library="550.90.07",
        problem=(
            "driver/library mismatch: the kernel module is 550.54.14, the library is 550.90.07: "
            "reload the module (rmmod, then modprobe nvidia) or reboot"
        ),
    )


@pytest.mark.parametrize(
    "said",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release Build  (dvs-builder@U16-I1)",
    ],
    ids=["closed", "open"],
)
def test_both_kernel_modules_tell_their_version(tmp_path: Path, said: str) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": f"{said}\nGCC version:  gcc version 11.3.0\n"})
    assert facts(tmp_path).driver.version == "535.54.03"


def test_a_node_without_gpus_needs_no_driver(tmp_path: Path) -> None:
    nvidia_device(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000", driver="i915")
    assert facts(tmp_path).driver == Driver()


@pytest.mark.parametrize("driver", ["vfio-pci", "nouveau", None])
def test_a_gpu_that_nvidias_driver_does_not_have_is_idle(tmp_path: Path, driver: str | None) -> None:
    nvidia_device(tmp_path, "0000:10:00.0")
    nvidia_device(tmp_path, "0000:11:00.0", driver=driver)
    nvidia_device(tmp_path, "0000:11:00.1", driver="snd_hda_intel", kind="0x040300")
    found = facts(tmp_path, FakeNvml(card(0)))
    assert (found.driver.idle_devices, found.driver.problem) == (("0000:11:00.0",), None)
    assert [gpu.pci for gpu in found.gpus] == ["0000:10:00.0"]


def test_gpus_on_the_bus_without_a_driver_are_a_problem(tmp_path: Path) -> None:
    nvidia_device(tmp_path, "0000:10:00.0", driver=None)
    driver = facts(tmp_path).driver
    assert driver.idle_devices == ("0000:10:00.0",)
    assert driver.problem is not None and driver.problem.startswith("libnvidia-ml.so.1 is not found: install")


def test_a_machine_with_one_memory_has_no_numa_node_for_its_gpu(tmp_path: Path) -> None:
    nvidia_device(tmp_path, "0000:10:00.0", numa=-1)
    assert facts(tmp_path, FakeNvml(card(0))).gpus[0].numa is None


# MPS.


def test_mps_runs_when_its_pipe_and_its_daemon_are_there(tmp_path: Path) -> None:
    process(tmp_path, 50, "nvidia-cuda-mps")
    assert not facts(tmp_path).driver.mps
    write(tmp_path, {"tmp/nvidia-mps/control": ""})
    assert facts(tmp_path).driver.mps
    assert not facts(tmp_path, environ={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}).driver.mps
    write(tmp_path, {"run/mps/control": ""})
    assert facts(tmp_path, environ={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}).driver.mps


def test_the_pipe_of_a_dead_mps_daemon_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"tmp/nvidia-mps/control": ""})
    process(tmp_path, 51, "python3")
    assert not facts(tmp_path).driver.mps


# Processes on GPUs.


def test_processes_have_names_and_ours_their_attempt(tmp_path: Path) -> None:
    process(tmp_path, 100, "python3", OURS)
    process(tmp_path, 200, "blender", {"HOME": "/home/eve"})
    found = facts(tmp_path, FakeNvml(card(0, computing={100: GIB, 200: 2 * GIB, 300: None})))
    assert found.gpus[0].processes == (
        GpuProcess(pid=100, name="python3", memory_bytes=1073741824, attempt_id="train-1.1"),
        GpuProcess(pid=200, name="blender", memory_bytes=2147483648),
        GpuProcess(pid=300, name="?"),
    )
    assert essentials(found, 1.0).foreign == ("blender (pid 200) on GPU 0", "? (pid 300) on GPU 0")


def test_a_process_whose_title_covers_its_environment_is_known_by_those_above_it(tmp_path: Path) -> None:
    process(tmp_path, 10, "raylet (1)", {"PATH": "/usr/bin"})
    process(tmp_path, 20, "python3", {"RAYCONTROL_SUPERVISOR": "train-1.1"}, parent=10)
    process(tmp_path, 30, "ray::train", None, parent=20)
    process(tmp_path, 40, "ray::other", None, parent=10)
    found = facts(tmp_path, FakeNvml(card(0, computing={30: GIB, 40: GIB})))
    assert [(entry.name, entry.attempt_id) for entry in found.gpus[0].processes] == [
        ("ray::train", "train-1.1"),
        ("ray::other", None),
    ]


def test_the_server_of_mps_is_part_of_the_driver(tmp_path: Path) -> None:
    process(tmp_path, 51, "nvidia-cuda-mps")
    found = facts(tmp_path, FakeNvml(card(0, computing={51: GIB})))
    assert found.gpus[0].processes == ()


# Interfaces.


def test_interfaces_have_addresses_speeds_and_a_state(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", speed=25_000)
    interface(tmp_path, "eth1", state="down", speed=-1)
    interface(tmp_path, "eth10", speed=0xFFFFFFFF)
    interface(tmp_path, "lo", state="unknown", speed=None)
    write(tmp_path, {"sys/class/net/bonding_masters": "bond0\n"})
    addresses = {"eth0": ("10.0.0.5/24", "fe80::1/64"), "lo": ("127.0.0.1/8",), "tun0": ("10.9.0.1/32",)}
    assert facts(tmp_path, addresses=addresses).interfaces == (
        Interface(
            name="eth0", up=True, speed_mbps=25000, addresses=("10.0.0.5/24", "fe80::1/64"), owns_ray_ip=True
        ),
        Interface(name="eth1", up=False),
        Interface(name="eth10", up=True),
        Interface(name="lo", up=True, addresses=("127.0.0.1/8",)),
        Interface(name="tun0", up=True, addresses=("10.9.0.1/32",)),
    )


@pytest.mark.parametrize("ip", ["fd00::5", "fd00:0:0::5", "fd00::5%eth0"])
def test_an_ipv6_address_is_found_in_whatever_form(tmp_path: Path, ip: str) -> None:
    interface(tmp_path, "eth0")
    (found,) = facts(tmp_path, ip=ip, addresses={"eth0": ("fe80::1/64", "fd00::5/64")}).interfaces
    assert found.owns_ray_ip


# RDMA.


def test_a_bond_of_roce_cards_has_the_index_of_its_address(tmp_path: Path) -> None:
    infiniband(
        tmp_path / "sys/class/infiniband", "mlx5_bond_0", ip=IP, link_layer="Ethernet", interface="bond0"
    )
    interface(tmp_path, "bond0", bond=True)
    verbs(tmp_path, "mlx5")
    found = facts(tmp_path)
    (port,) = found.rdma
    assert port.gids == (
        Gid(index=0, gid="fe80:0000:0000:0000:bace:f6ff:fed2:1a0c", type="IB/RoCE v1", interface="bond0"),
        Gid(index=1, gid="fe80:0000:0000:0000:bace:f6ff:fed2:1a0c", type="RoCE v2", interface="bond0"),
        Gid(index=2, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="IB/RoCE v1", interface="bond0"),
        Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="RoCE v2", interface="bond0"),
    )
    assert (port.interfaces, port.bond) == (("bond0",), "bond0")
    assert essentials(found, 0.0).hcas[0].gid_index == 3


def test_a_card_whose_interface_is_part_of_a_bond_belongs_to_it(tmp_path: Path) -> None:
    devices = tmp_path / "sys/class/infiniband"
    infiniband(devices, "mlx5_0", ip=IP, link_layer="Ethernet", interface="eth2")
    infiniband(devices, "mlx5_1", ip=IP, link_layer="Ethernet", interface="eth3")
    interface(tmp_path, "bond0", bond=True)
    interface(tmp_path, "eth2", master="bond0")
    interface(tmp_path, "eth3", master="br0")
    interface(tmp_path, "br0")
    assert [port.bond for port in facts(tmp_path).rdma] == ["bond0", None]


def test_a_port_that_is_down_says_so(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0", state="DOWN")
    (port,) = facts(tmp_path).rdma
    assert (port.state, port.up) == ("DOWN", False)


def test_a_card_with_two_ports(tmp_path: Path) -> None:
    devices = tmp_path / "sys/class/infiniband"
    infiniband(devices, "mlx4_0", driver="mlx4_core", interface="ib0")
    infiniband(devices, "mlx4_0", driver=None, port=2, state="INIT")
    verbs(tmp_path, "mlx4")
    found = [(port.name, port.state, port.interfaces, port.provider) for port in facts(tmp_path).rdma]
    provider = f"/{LIBRARIES}/libibverbs/libmlx4-rdmav34.so"
    assert found == [("mlx4_0:1", "ACTIVE", (), provider), ("mlx4_0:2", "INIT", (), provider)]


def test_a_card_without_its_provider(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0")
    verbs(tmp_path, "efa")
    found = facts(tmp_path)
    assert found.verbs == f"/{LIBRARIES}/libibverbs.so.1"
    assert (found.rdma[0].driver, found.rdma[0].provider) == ("mlx5_core", None)


def test_providers_are_of_no_use_without_libibverbs(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0")
    verbs(tmp_path, "mlx5")
    (tmp_path / LIBRARIES / "libibverbs.so.1").unlink()
    found = facts(tmp_path)
    assert (found.verbs, found.rdma[0].provider) == (None, None)


@pytest.mark.parametrize(
    ("device", "driver", "provider"),
    [
        ("rxe0", None, "rxe"),
        ("rxe0", "mlx5_core", "rxe"),
        ("siw_eth0", None, "siw"),
        ("mlx5_bond_0", None, "mlx5"),
        ("rocep1s0f0", "bnxt_en", "bnxt_re"),
        ("rocep1s0f1", "ice", "irdma"),
        ("rdmap16s27", "efa", "efa"),
        ("hns_0", "hns3", "hns"),
        ("roceo1", "hns_roce_hw_v2", "hns"),
        ("ibp5s0", "mlx5_core", "mlx5"),
        ("erdma_0", "erdma", "erdma"),
    ],
)
def test_each_device_finds_its_provider(
    tmp_path: Path, device: str, driver: str | None, provider: str
) -> None:
    infiniband(tmp_path / "sys/class/infiniband", device, link_layer="Ethernet", driver=driver)
    verbs(tmp_path, "bnxt_re", "efa", "erdma", "hns", "irdma", "mlx5", "rxe", "siw")
    (port,) = facts(tmp_path).rdma
    assert (port.driver, port.provider) == (driver, f"/{LIBRARIES}/libibverbs/lib{provider}-rdmav34.so")


def test_libraries_of_ld_library_path_come_first(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0")
    verbs(tmp_path, "mlx5")
    verbs(tmp_path, "mlx5", folder="opt/rdma/lib")
    found = facts(tmp_path, environ={"LD_LIBRARY_PATH": "/nowhere::/opt/rdma/lib"})
    assert found.verbs == "/opt/rdma/lib/libibverbs.so.1"
    assert found.rdma[0].provider == "/opt/rdma/lib/libibverbs/libmlx5-rdmav34.so"


def test_a_provider_may_lie_where_its_configuration_says(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0")
    verbs(tmp_path)
    write(tmp_path, {"etc/libibverbs.d/mlx5.driver": "driver /opt/ofed/libmlx5\n"})
    assert facts(tmp_path).rdma[0].provider is None
    write(tmp_path, {"opt/ofed/libmlx5-rdmav25.so": ""})
    assert facts(tmp_path).rdma[0].provider == "/opt/ofed/libmlx5-rdmav25.so"


def test_an_old_provider_lies_among_the_other_libraries(tmp_path: Path) -> None:
    infiniband(tmp_path / "sys/class/infiniband", "mlx5_0")
    verbs(tmp_path, folder="usr/lib64")
    write(tmp_path, {"etc/libibverbs.d/mlx5.driver": "driver mlx5\n", "usr/lib64/libmlx5-rdmav2.so": ""})
    assert facts(tmp_path).rdma[0].provider == "/usr/lib64/libmlx5-rdmav2.so"


def test_collecting_takes_some_milliseconds(tmp_path: Path) -> None:
    trees.dgx(tmp_path, IP)
    library = FakeNvml(*(card(number) for number in range(8)))
    started = time.process_time()
    facts(tmp_path, library)
    assert time.process_time() - started < 0.5


# What is installed.


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        (
            "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n__version__ = '2.13.0+cpu'\n"
            "debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
            ("2.13.0+cpu", None),
        ),
        ("__version__ = '2.4.0+cu121'\ncuda: Optional[str] = '12.1'\n", ("2.4.0+cu121", "12.1")),
        ("__version__ = '1.13.1'\ncuda = '11.7'\n", ("1.13.1", "11.7")),
        ("this is not Python", (None, None)),
    ],
)
def test_pytorch_has_written_down_its_versions(
    tmp_path: Path, text: str, versions: tuple[str | None, str | None]
) -> None:
    write(tmp_path, {"version.py": text})
    assert torch_versions(tmp_path) == versions


def test_a_folder_called_torch_is_no_pytorch(tmp_path: Path) -> None:
    assert torch_versions(tmp_path) == (None, None)


def test_programs_on_the_path_tell_their_versions(tmp_path: Path) -> None:
    program(tmp_path / "bin/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    program(tmp_path / "bin/cc", "echo 'cc (Ubuntu) 11.4.0'; echo 'Copyright'")
    found = installed({"PATH": f"{tmp_path}/bin:/nowhere"}, tmp_path)
    assert (found.nvcc, found.compiler, found.headers) == ("12.4.131", "cc (Ubuntu) 11.4.0", None)


def test_cuda_is_found_beside_the_path(tmp_path: Path) -> None:
    program(tmp_path / "usr/local/cuda/bin/nvcc", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    assert installed({"PATH": "/nowhere"}, tmp_path).nvcc == "11.8.89"


def test_programs_that_fail_tell_nothing(tmp_path: Path) -> None:
    program(tmp_path / "bin/nvcc", "echo V12.4.131; exit 1")
    program(tmp_path / "bin/gcc", "exit 0")
    found = installed({"PATH": f"{tmp_path}/bin"}, tmp_path)
    assert (found.nvcc, found.compiler) == (None, None)


def test_a_program_that_does_not_answer_is_given_up_with_what_it_started(tmp_path: Path) -> None:
    program(tmp_path / "bin/nvcc", "/bin/sleep 600")
    started = time.monotonic()
    assert installed({"PATH": f"{tmp_path}/bin"}, tmp_path, answer_limit_s=0.2).nvcc is None
    assert time.monotonic() - started < 30


def test_headers_fit_the_running_kernel(tmp_path: Path) -> None:
    release = trees.KERNEL
    write(tmp_path, {"proc/sys/kernel/osrelease": f"{release}\n"})
    trees.link(tmp_path / f"lib/modules/{release}/build", "nothing-is-there")
    assert installed({"PATH": "/nowhere"}, tmp_path).headers is None
    write(tmp_path, {f"usr/src/linux-headers-{release}/Makefile": ""})
    assert installed({"PATH": "/nowhere"}, tmp_path).headers == f"/usr/src/linux-headers-{release}"
    write(tmp_path, {f"lib/modules/{release}/nothing-is-there/Makefile": ""})
    assert installed({"PATH": "/nowhere"}, tmp_path).headers == f"/lib/modules/{release}/build"


def program(path: Path, script: str) -> None:
    write(path.parent, {path.name: f"#!/bin/sh\n{script}\n"})
    path.chmod(stat.S_IRWXU)
