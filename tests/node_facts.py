"""Nodes as tests want them: a healthy one with two GPUs, RDMA and everything else, and one with nothing but CPUs."""

from __future__ import annotations

from typing import Any

from raycontrol.hardware import (
    Driver,
    Gid,
    Gpu,
    Interface,
    Limit,
    NodeFacts,
    NodeInfo,
    RayStart,
    RdmaPort,
)
from raycontrol.raysettings import variables

GIB = 2**30


def cpu_facts(**changes: Any) -> NodeFacts:
    """A machine without GPUs and RDMA, on which every check is ok or does not apply."""
    facts = {
        "hostname": "host-a",
        "ip": "10.0.0.5",
        "at": 1_700_000_000.0,
        "kernel": "5.15.0-91-generic",
        "headers": "/usr/src/linux-headers-5.15.0-91-generic",
        "cores": 16,
        "memory_bytes": 64 * GIB,
        "shm_bytes": 32 * GIB,
        "scratch": "/tmp/ray/session/raycontrol",
        "scratch_free_bytes": 200 * GIB,
        "open_files": Limit(soft=65_536, hard=1_048_576),
        "memlock": Limit(soft=65_536, hard=65_536),
        "interfaces": (
            Interface(name="lo", up=True, addresses=("127.0.0.1/8",)),
            Interface(name="eth0", up=True, speed_mbps=25_000, addresses=("10.0.0.5/24",), owns_ray_ip=True),
        ),
        "torch": "2.4.0",
        "compiler": "gcc 11.4.0",
        "ray": RayStart(raylet=variables(head=False)),
    }
    return NodeFacts(**{**facts, **changes})


def gpu(index: int = 0, **changes: Any) -> Gpu:
    facts = {
        "index": index,
        "uuid": f"GPU-{index}",
        "model": "NVIDIA H100",
        "memory_bytes": 80 * GIB,
        "pci": f"0000:{index + 1:02x}:00.0",
        "ecc_errors": 0,
    }
    return Gpu(**{**facts, **changes})


def roce_port(device: str = "mlx5_0", **changes: Any) -> RdmaPort:
    """A port over Ethernet that has the node's address 10.0.0.5 at GID index 3."""
    facts = {
        "device": device,
        "port": 1,
        "state": "ACTIVE",
        "link_layer": "Ethernet",
        "gids": (Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0005", type="RoCE v2"),),
        "driver": "mlx5_core",
        "provider": "libmlx5",
    }
    return RdmaPort(**{**facts, **changes})


def gpu_facts(**changes: Any) -> NodeFacts:
    """A machine with two GPUs and two RDMA ports, on which every check is ok."""
    facts = {
        "driver": Driver(version="550.54.14", library="550.54.14", cuda="12.4"),
        "gpus": (gpu(0), gpu(1)),
        "rdma": (roce_port("mlx5_0"), roce_port("mlx5_1")),
        "verbs": "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
        "gpudirect": ("nvidia_peermem",),
        "memlock": Limit(soft=-1, hard=-1),
        "torch_cuda": "12.1",
        "nvcc": "12.4",
    }
    return cpu_facts(**{**facts, **changes})


def node(name: str = "host-a", facts: NodeFacts | None = None, **changes: Any) -> NodeInfo:
    """A node whose Ray counts what its facts have; ``changes`` are of the node."""
    gpus = {"GPU": float(len(facts.gpus))} if facts is not None and facts.gpus else {}
    resources = {"CPU": 16.0, "memory": 48.0 * GIB, **gpus}
    values = {"id": f"id-of-{name}", "name": name, "ip": "10.0.0.5", "total": resources, "free": resources}
    return NodeInfo(**{**values, "facts": facts, **changes})


def plain_facts(anew: bool) -> NodeFacts:
    """As a node's ``collect``: a machine without anything special."""
    return cpu_facts()
