"""What jobs use, in words: the rows of ``top``, its document, and the line of ``get``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycontrol.hardware import GpuSample, InstanceUsage
    from raycontrol.status import JobInfo

COLUMNS = ("JOB", "INSTANCE", "NODE", "CPU %", "MEMORY", "READ/s", "WRITTEN/s", "GPU", "AGE")
GPU_COLUMN = COLUMNS.index("GPU")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Samples = tuple["InstanceUsage", ...]


@dataclass(frozen=True)
class Look:
    """What was seen at one moment: jobs, each with the last samples of its instances by their names."""

    at: float
    jobs: tuple[tuple[JobInfo, Mapping[str, Samples]], ...]


def rows(look: Look) -> list[tuple[str, ...]]:
    """Return the rows of the table: one for each instance, and one more for each GPU after its first."""
    found = []
    for info, usage in look.jobs:
        for instance in info.instances:
            measured, gpus = _cells(usage.get(instance.name, ()), look.at)
            line = (info.id, instance.name, instance.node, *measured[:-1], gpus[0], measured[-1])
            found.append(line)
            found += [_only(gpu) for gpu in gpus[1:]]
    return found


def document(look: Look) -> dict[str, Any]:
    """Return a look for ``--json``; ``usage`` is None for an instance without samples."""
    return {"at": look.at, "jobs": [_job_document(info, usage) for info, usage in look.jobs]}


def total(samples: Sequence[InstanceUsage]) -> str:
    """Return in a few words what instances use together: ``187 % CPU, 3.2 GiB, 4 GPUs at 93 %``."""
    cpu_percent = sum(sample.cpu_percent for sample in samples)
    words = [f"{cpu_percent:.0f} % CPU", in_bytes(sum(sample.memory_bytes for sample in samples))]
    gpus = [gpu for sample in samples for gpu in sample.gpus]
    busy = [gpu.utilisation_percent for gpu in gpus if gpu.utilisation_percent is not None]
    if busy:
        count = "1 GPU" if len(busy) == 1 else f"{len(busy)} GPUs"
        words.append(f"{count} at {sum(busy) / len(busy):.0f} %")
    return ", ".join(words)


def in_bytes(count: float) -> str:
    """Return ``512 B``, ``1.5 GiB``."""
    unit = 0
    while count >= 1023.95 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {UNITS[unit]}" if unit else f"{count:.0f} B"


def _cells(samples: Samples, now: float) -> tuple[list[str], list[str]]:
    """Return an instance's cells from CPU to AGE without GPU, and one for each of its GPUs, at least an empty one."""
    from raycontrol.cli.render import duration

    if not samples:
        return [""] * 5, [""]
    last = samples[-1]
    transfer = [in_bytes(rate) if rate is not None else "" for rate in _rates(samples)]
    cells = [f"{last.cpu_percent:.0f}", in_bytes(last.memory_bytes), *transfer, duration(now - last.at)]
    return cells, [gpu_cell(gpu) for gpu in last.gpus] or [""]


def gpu_cell(gpu: GpuSample) -> str:
    """Return ``0: 98 % 61.2 GiB of 80.0 GiB 412 W 66 °C``, less what is not known."""
    if gpu.fault is not None:
        return f"{gpu.index}: {gpu.fault}"
    parts: list[str] = []
    if gpu.utilisation_percent is not None:
        parts.append(f"{gpu.utilisation_percent:.0f} %")
    if gpu.memory_bytes is not None:
        whole = f" of {in_bytes(gpu.memory_total_bytes)}" if gpu.memory_total_bytes is not None else ""
        parts.append(in_bytes(gpu.memory_bytes) + whole)
    if gpu.power_w is not None:
        parts.append(f"{gpu.power_w:.0f} W")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c:.0f} °C")
    if gpu.throttled:
        parts.append(f"throttled: {', '.join(gpu.throttled)}")
    return f"{gpu.index}: {' '.join(parts)}".rstrip()


def _only(gpu: str) -> tuple[str, ...]:
    return tuple(gpu if number == GPU_COLUMN else "" for number in range(len(COLUMNS)))


def _rates(samples: Samples) -> tuple[float, float] | tuple[None, None]:
    from raycontrol.samples import rates

    return rates(samples[-2], samples[-1]) if len(samples) > 1 else (None, None)


def _job_document(info: JobInfo, usage: Mapping[str, Samples]) -> dict[str, Any]:
    instances = []
    for instance in info.instances:
        samples = usage.get(instance.name, ())
        read, written = _rates(samples)
        instances.append(
            {
                "name": instance.name,
                "node": instance.node,
                "state": instance.state,
                "usage": samples[-1].model_dump(mode="json") if samples else None,
                "read_bytes_per_s": read,
                "written_bytes_per_s": written,
            }
        )
    return {"id": info.id, "state": info.state, "attempt": info.attempt, "instances": instances}
