"""A pynvml without GPUs: functions, values and errors as the real one has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class Card:
    """A GPU. ``refuses`` are the errors that functions give for it, ``lost`` makes that GPU_IS_LOST for each of them.

    ``computing``, ``mps_clients``: memory in bytes by pid (None: not known); ``parts``: total and used memory of its
    MIG instances by uuid. Power is in milliwatts; None is what this kind of GPU does not support.
    """

    uuid: str = "GPU-6f9d8a4e-0000-0000-0000-000000000000"
    bus: int = 0x10
    domain: int = 0
    model: str = "NVIDIA A100-SXM4-80GB"
    total: int = 80 * GIB
    used: int = 0
    busy_percent: int | None = 0
    milliwatts: int | None = 60_000
    celsius: int | None = 30
    throttle_bits: int | None = 0
    ecc_errors: int | None = 0
    mig: bool | None = False
    computing: Mapping[int, int | None] = field(default_factory=dict)
    mps_clients: Mapping[int, int | None] = field(default_factory=dict)
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refuses: dict[str, int] = field(default_factory=dict)
    lost: bool = False


@dataclass(eq=False)
class Handle:
    """As in ctypes, two handles of one GPU are not equal."""

    card: Card
    part: str | None = None


@dataclass(eq=False)
class EventSet:
    cards: list[Card] = field(default_factory=list)
    waiting: list[tuple[Card, int]] = field(default_factory=list)


class FakeNvml:
    """The module. ``refuses`` are the errors of functions that ask no GPU; ``old`` is a binding whose strings are bytes.

    ``inits`` counts who has it open: with 0 every function but the library's version says that it is not initialised.
    """

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def __init__(
        self,
        *cards: Card,
        driver: str = "550.54.14",
        library: str = "12.550.54.14",
        cuda: int = 12040,
        refuses: Mapping[str, int] | None = None,
        old: bool = False,
    ) -> None:
        self.cards = list(cards)
        self.refuses = dict(refuses or {})
        self.inits = 0
        self.event_sets: list[EventSet] = []
        self._driver = driver
        self._library = library
        self._cuda = cuda
        self._old = old

    def __getattr__(self, name: str) -> Any:
        """Constants are the real module's; a function that this one lacks is missing, as in an old binding."""
        if name.startswith(("NVML_", "nvmlEventType")):
            return getattr(pynvml, name)
        raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

    def happen(self, card: Card, xid: int) -> None:
        """Let a GPU have an XID error."""
        for events in self.event_sets:
            if card in events.cards:
                events.waiting.append((card, xid))

    # The library.

    def nvmlInit(self) -> None:
        self._refuse("nvmlInit")
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self._opened("nvmlShutdown")
        self.inits -= 1

    def nvmlSystemGetNVMLVersion(self) -> str | bytes:
        if self.refuses.get("nvmlInit") == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return self._string(self._library)

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._opened("nvmlSystemGetDriverVersion")
        return self._string(self._driver)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._opened("nvmlSystemGetCudaDriverVersion_v2")
        return self._cuda

    # Handles.

    def nvmlDeviceGetCount(self) -> int:
        self._opened("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        self._opened("nvmlDeviceGetHandleByIndex")
        if not 0 <= index < len(self.cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        handle = Handle(self.cards[index])
        self._asked("nvmlDeviceGetHandleByIndex", handle)
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        self._opened("nvmlDeviceGetHandleByUUID")
        for card in self.cards:
            if uuid == card.uuid:
                return Handle(card)
            if uuid in card.parts:
                return Handle(card, uuid)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle:
        self._asked("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return Handle(handle.card)

    # What a GPU is.

    def nvmlDeviceGetUUID(self, handle: Handle) -> str | bytes:
        self._asked("nvmlDeviceGetUUID", handle)
        return self._string(handle.part or handle.card.uuid)

    def nvmlDeviceGetName(self, handle: Handle) -> str | bytes:
        self._asked("nvmlDeviceGetName", handle)
        return self._string(handle.card.model)

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        card = self._asked("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(domain=card.domain, bus=card.bus, device=0)

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        card = self._asked("nvmlDeviceGetMemoryInfo", handle)
        total, used = card.parts[handle.part] if handle.part else (card.total, card.used)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        mode = self._supported(self._asked("nvmlDeviceGetMigMode", handle).mig)
        return [int(mode), int(mode)]

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._supported(self._asked("nvmlDeviceGetTotalEccErrors", handle).ecc_errors)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        return _processes(self._asked("nvmlDeviceGetComputeRunningProcesses", handle).computing)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        return _processes(self._asked("nvmlDeviceGetMPSComputeRunningProcesses", handle).mps_clients)

    # What it does.

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        card = self._asked("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=self._supported(None if card.mig else card.busy_percent), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return self._supported(self._asked("nvmlDeviceGetPowerUsage", handle).milliwatts)

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._supported(self._asked("nvmlDeviceGetTemperature", handle).celsius)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int:
        """The name that old bindings and drivers have; the newer one is missing here."""
        return self._supported(self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", handle).throttle_bits)

    # Events.

    def nvmlEventSetCreate(self) -> EventSet:
        self._opened("nvmlEventSetCreate")
        self.event_sets.append(EventSet())
        return self.event_sets[-1]

    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: EventSet) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        events.cards.append(self._asked("nvmlDeviceRegisterEvents", handle))

    def nvmlEventSetWait_v2(self, events: EventSet, timeout_ms: int) -> Any:
        self._opened("nvmlEventSetWait_v2")
        if not events.waiting:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        card, xid = events.waiting.pop(0)
        return SimpleNamespace(device=Handle(card), eventData=xid)

    def nvmlEventSetFree(self, events: EventSet) -> None:
        self._opened("nvmlEventSetFree")
        self.event_sets.remove(events)

    # Errors.

    def _opened(self, function: str) -> None:
        if self.inits == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self._refuse(function)

    def _refuse(self, function: str) -> None:
        if function in self.refuses:
            raise pynvml.NVMLError(self.refuses[function])

    def _asked(self, function: str, handle: Handle) -> Card:
        self._opened(function)
        if handle.card.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if function in handle.card.refuses:
            raise pynvml.NVMLError(handle.card.refuses[function])
        return handle.card

    def _supported(self, value: int | None) -> int:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def _string(self, text: str) -> str | bytes:
        return text.encode() if self._old else text


class OldDriver(FakeNvml):
    """A driver before 510 under a new binding: of the processes' list it has only the older version."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        raise pynvml.NVMLLibraryMismatchError(
            "Unversioned function called and the pyNVML version does not match"
        )

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Handle) -> list[Any]:
        return super().nvmlDeviceGetComputeRunningProcesses(handle)


def _processes(memory_by_pid: Mapping[int, int | None]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in memory_by_pid.items()]
