"""NVIDIA's devices on this machine: what their driver says (``nvml``) and what the kernel says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from raycontrol.hardware import Driver, Gpu, GpuProcess
from raycontrol.supervisor import MARK, SUPERVISOR_MARK
from raycontrol.sysfiles import exists, link_name, matching, names_in, number_of, text_of

NVIDIA = "0x10de"
"""The vendor on PCI."""
DISPLAY = "0x03"
"""How the PCI class of graphics cards and of GPUs without an outlet begins."""
GPUDIRECT = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")
"""Kernel modules that let RDMA devices (the last: the CPU) reach GPU memory. That a kernel shares it by dma-buf cannot be seen."""
MPS_FOLDER = "/tmp/nvidia-mps"
MPS_NAME = "nvidia-cuda-mps"
"""What the kernel keeps of ``nvidia-cuda-mps-control`` and ``nvidia-cuda-mps-server``: 15 characters."""

DRIVER_S = 20.0
"""Without persistence mode a driver takes seconds for each GPU when nobody has used it for a while."""

Describe = Callable[[str | None], tuple[Driver, tuple[Gpu, ...]]]


class InTime:
    """``describe`` with a time limit, for a driver may never answer: then that is its problem, until it does.

    It is asked in a thread of its own, a daemon, which keeps no process from ending; and never twice at once.
    """

    def __init__(self, describe: Describe, limit_s: float = DRIVER_S) -> None:
        self._describe = describe
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._asked: Future[tuple[Driver, tuple[Gpu, ...]]] | None = None
        self._overdue = False

    def __call__(self, module: str | None) -> tuple[Driver, tuple[Gpu, ...]]:
        with self._lock:
            asked = self._asked = self._asked or self._ask(module)
        done, _ = wait([asked], 0 if self._overdue else self._limit_s)
        self._overdue = not done
        if not done:
            problem = (
                f"the driver did not answer within {self._limit_s:g} s; does `nvidia-smi` answer on the node?"
            )
            return Driver(version=module, problem=problem), ()
        with self._lock:
            self._asked = None if self._asked is asked else self._asked
        return asked.result()

    def _ask(self, module: str | None) -> Future[tuple[Driver, tuple[Gpu, ...]]]:
        answer: Future[tuple[Driver, tuple[Gpu, ...]]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._describe(module))
            except BaseException as error:  # it is raised to whoever waits for the answer
                answer.set_exception(error)

        threading.Thread(target=ask, name="gpu driver", daemon=True).start()
        return answer


def driver_and_gpus(
    root: Path, environ: Mapping[str, str], describe: Describe
) -> tuple[Driver, tuple[Gpu, ...]]:
    """Return the driver and the GPUs, which ``describe`` finds when told the version of the loaded kernel module.

    That they cannot be asked is no problem on a node that has none.
    """
    module = _module_version(root)
    driver, gpus = describe(module)
    devices = _nvidia_devices(root)
    expected = module is not None or devices
    about_this_node = {
        "problem": driver.problem if expected else None,
        "idle_devices": tuple(address for address in devices if not _has_nvidias_driver(root, address)),
        "mps": _has_mps(root, environ),
    }
    return driver.model_copy(update=about_this_node), tuple(_placed(root, gpu) for gpu in gpus)


def _module_version(root: Path) -> str | None:
    """Return the version of NVIDIA's loaded kernel module."""
    said = text_of(root / "proc/driver/nvidia/version") or ""
    version = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", said)
    return version and version[1]


def _nvidia_devices(root: Path) -> list[str]:
    """Return the PCI addresses of NVIDIA's GPUs; its bridges and sound devices are of other classes."""
    folder = root / "sys/bus/pci/devices"
    return [
        address
        for address in names_in(folder)
        if text_of(folder / address / "vendor") == NVIDIA
        and (text_of(folder / address / "class") or "").startswith(DISPLAY)
    ]


def _has_nvidias_driver(root: Path, address: str) -> bool:
    return link_name(root / "sys/bus/pci/devices" / address / "driver") == "nvidia"


def _has_mps(root: Path, environ: Mapping[str, str]) -> bool:
    """Whether an MPS daemon runs where CUDA would look for it: its pipe is there, which a killed one leaves, and it is."""
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER
    if not exists(root / folder.lstrip("/") / "control"):
        return False
    return any(text_of(root / "proc" / pid / "comm") == MPS_NAME for pid in matching(root / "proc", r"\d+"))


def _placed(root: Path, gpu: Gpu) -> Gpu:
    """Return the GPU with its NUMA node and the names of its processes."""
    numa = number_of(root / "sys/bus/pci/devices" / gpu.pci / "numa_node")
    known = (_known(root, process) for process in gpu.processes)
    return gpu.model_copy(
        update={
            "numa": numa if numa is not None and numa >= 0 else None,
            # The daemon of MPS is part of the driver; its clients are listed themselves.
            "processes": tuple(process for process in known if process.name != MPS_NAME),
        }
    )


def _known(root: Path, process: GpuProcess) -> GpuProcess:
    """Return the process with its name and attempt; a pid of a namespace that is not ours keeps its ``?``."""
    name = text_of(root / "proc" / str(process.pid) / "comm")
    if name is None:
        return process
    return process.model_copy(update={"name": name, "attempt_id": _attempt_of(root, process.pid)})


def _attempt_of(root: Path, pid: int) -> str | None:
    """Return the mark of the process or, where its own environment is overwritten (by its title), of those above it."""
    for ancestor in _lineage(root, pid):
        entries = (text_of(root / "proc" / ancestor / "environ") or "").split("\0")
        marks = dict(
            entry.split("=", 1) for entry in entries if entry.startswith((f"{MARK}=", f"{SUPERVISOR_MARK}="))
        )
        if marks:
            return marks.get(MARK) or marks[SUPERVISOR_MARK]
    return None


def _lineage(root: Path, pid: int) -> Iterator[str]:
    while pid > 1:
        yield str(pid)
        behind_the_name = (text_of(root / "proc" / str(pid) / "stat") or "").rpartition(")")[2].split()
        pid = int(behind_the_name[1]) if len(behind_the_name) > 1 else 0


def gpudirect(root: Path) -> tuple[str, ...]:
    """Return those of the modules that are loaded."""
    loaded = {line.partition(" ")[0] for line in (text_of(root / "proc/modules") or "").splitlines()}
    return tuple(module for module in GPUDIRECT if module in loaded)
