"""Generated trees of files as /sys, /proc and /usr have them, for nodes with hardware that is not here.

Links lead nowhere: of a driver only the name at the end of its link is read.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

KERNEL = "5.15.0-105-generic"
LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
"""Where libraries lie on a Debian or Ubuntu of this architecture."""

ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
GIDS = 16
"""Entries in a port's table; real cards have some hundred, most of them empty."""


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files, by their path below the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


# GPUs.


def nvidia_device(
    root: Path,
    address: str,
    *,
    driver: str | None = "nvidia",
    kind: str = "0x030200",
    numa: int = 0,
    vendor: str = "0x10de",
) -> None:
    """Write a device on PCI; ``kind`` is its class: 0x030200 is a GPU without outlets, 0x068000 an NVSwitch."""
    folder = root / "sys/bus/pci/devices" / address
    write(folder, {"vendor": f"{vendor}\n", "class": f"{kind}\n", "numa_node": f"{numa}\n"})
    if driver:
        link(folder / "driver", f"../../../../bus/pci/drivers/{driver}")


def nvidia_driver(root: Path, version: str = "550.54.14", modules: tuple[str, ...] = ()) -> None:
    """Write what the loaded kernel module says, and the list of modules with others of NVIDIA."""
    said = (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Feb 22 01:44:30 UTC 2024\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    lines = [f"{module} 16384 0 - Live 0x0000000000000000" for module in ("nvidia_uvm", *modules, "nvidia")]
    write(root, {"proc/driver/nvidia/version": said, "proc/modules": "\n".join(lines) + "\n"})


def process(
    root: Path, pid: int, name: str, environ: Mapping[str, str] | None = None, parent: int = 1
) -> None:
    """Write a process; with None it has an environment that nobody can read any more."""
    entries = "" if environ is None else "\0".join(f"{key}={value}" for key, value in environ.items()) + "\0"
    write(
        root / "proc" / str(pid),
        {"comm": f"{name}\n", "environ": entries, "stat": f"{pid} ({name}) S {parent} {pid} {pid} 0 -1\n"},
    )


# Networks.


def interface(
    root: Path,
    name: str,
    *,
    state: str = "up",
    speed: int | None = 100_000,
    bond: bool = False,
    master: str | None = None,
) -> None:
    """Write a network interface; a ``bond``, or one whose ``master`` is."""
    folder = root / "sys/class/net" / name
    write(folder, {"operstate": f"{state}\n"})
    if speed is not None:
        write(folder, {"speed": f"{speed}\n"})
    if bond:
        write(folder, {"bonding/mode": "802.3ad 4\n"})
    if master:
        link(folder / "master", f"../{master}")


def infiniband(
    folder: Path,
    device: str,
    *,
    ip: str | None = None,
    state: str = "ACTIVE",
    link_layer: str = "InfiniBand",
    port: int = 1,
    rate: str = "200 Gb/sec (4X HDR)",
    interface: str | None = None,
    driver: str | None = "mlx5_core",
) -> None:
    """Write a device's port into a folder that stands for /sys/class/infiniband.

    With ``Ethernet`` the table of GIDs is that of RoCE: of the link-local address and of ``ip``, each as v1 and as v2,
    so that v2 with ``ip`` has index 3. ``interface`` is the device's network interface. Without ``driver`` it is a
    device that is only software (``rxe0``).
    """
    number = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}[state]
    physical = "5: LinkUp" if state == "ACTIVE" else "3: Disabled"
    place = folder / device / "ports" / str(port)
    write(
        place,
        {
            "state": f"{number}: {state}\n",
            "phys_state": f"{physical}\n",
            "link_layer": f"{link_layer}\n",
            "rate": f"{rate}\n",
        },
    )
    _gids(place, _roce_gids(ip) if link_layer == "Ethernet" else _infiniband_gids(), interface, link_layer)
    if driver:
        link(folder / device / "device/driver", f"../../../../bus/pci/drivers/{driver}")
        if interface:
            write(folder / device / "device/net" / interface, {"dev_port": "0\n"})


def _infiniband_gids() -> list[tuple[str, str]]:
    return [("fe80:0000:0000:0000:b8ce:f603:00d2:1a0c", "IB/RoCE v1")]


def _roce_gids(ip: str | None) -> list[tuple[str, str]]:
    addresses = ["fe80:0000:0000:0000:bace:f6ff:fed2:1a0c", *([gid_of(ip)] if ip else [])]
    return [(address, version) for address in addresses for version in ("IB/RoCE v1", "RoCE v2")]


def gid_of(ip: str) -> str:
    """Return an address as a table of GIDs has it: ``0000:…:ffff:0a00:0005`` for 10.0.0.5."""
    address = ipaddress.ip_address(ip)
    mapped = f"::ffff:{address}" if address.version == 4 else str(address)
    return ipaddress.IPv6Address(mapped).exploded


def _gids(port: Path, used: list[tuple[str, str]], interface: str | None, link_layer: str) -> None:
    for index in range(GIDS):
        write(port, {f"gids/{index}": f"{ZERO_GID}\n"})
    for index, (gid, version) in enumerate(used):
        write(port, {f"gids/{index}": f"{gid}\n", f"gid_attrs/types/{index}": f"{version}\n"})
        if interface and link_layer == "Ethernet":
            write(port, {f"gid_attrs/ndevs/{index}": f"{interface}\n"})


def verbs(root: Path, *providers: str, folder: str = LIBRARIES) -> None:
    """Write libibverbs and the libraries of these providers beside it."""
    write(root / folder, {"libibverbs.so.1": ""})
    for name in providers:
        write(root / folder, {f"libibverbs/lib{name}-rdmav34.so": ""})
        write(root, {f"etc/libibverbs.d/{name}.driver": f"driver {name}\n"})


# Whole nodes.


def dgx(root: Path, ip: str) -> None:
    """Write a node with 8 GPUs and 8 InfiniBand cards, all of them well; ``eth0`` is the interface for ``ip``."""
    write(
        root,
        {
            "proc/sys/kernel/osrelease": f"{KERNEL}\n",
            "sys/devices/system/node/node0/cpulist": "0-63\n",
            "sys/devices/system/node/node1/cpulist": "64-127\n",
            "sys/devices/system/node/online": "0-1\n",
        },
    )
    nvidia_driver(root, modules=("nvidia_peermem", "nvidia_fs"))
    for number in range(8):
        nvidia_device(root, f"0000:{0x10 + number:02x}:00.0", numa=number // 4)
        infiniband(root / "sys/class/infiniband", f"mlx5_{number}", interface=f"ib{number}")
        interface(root, f"ib{number}", speed=200_000)
    nvidia_device(root, "0000:c4:00.0", kind="0x068000", driver="nvidia-nvswitch")
    nvidia_device(root, "0000:00:1f.0", vendor="0x8086", kind="0x060100", driver=None)
    interface(root, "eth0", speed=25_000)
    interface(root, "lo", state="unknown", speed=None)
    verbs(root, "mlx5", "efa")
