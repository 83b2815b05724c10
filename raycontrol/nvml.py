"""NVIDIA's management library: what GPUs there are (``describe``), and what they do just now (``Meter``).

Nothing here raises because of a driver, its absence or a broken GPU: that is said in the values. Functions and errors
are those of https://docs.nvidia.com/deploy/nvml-api. ``library`` is the module ``pynvml``, imported on use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycontrol.hardware import UNKNOWN, Driver, Gpu, GpuProcess, GpuSample

MOST_EVENTS = 1000
"""At a time, of a driver that reports errors without end."""

# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down; being idle or set to fixed clocks does not.
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

log = logging.getLogger(__name__)


def describe(module: str | None = None, library: Any = None) -> tuple[Driver, tuple[Gpu, ...]]:
    """Return the driver and its GPUs in PCI order. ``module`` is the version of the loaded kernel module, where known.

    Names of processes are left open, for the pids are all that the driver knows.
    """
    library = library or _imported()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return _unusable(library, error, module), ()
    try:
        return _working(library, module), tuple(_gpu(library, device) for device in _devices(library))
    except library.NVMLError as error:
        return _unusable(library, error, module), ()
    finally:
        _quietly(library, library.nvmlShutdown)


class Meter:
    """Measures GPUs. It opens the library on the first ``read`` and keeps it open until ``close``.

    Where there is no library or no driver then, it has nothing to say, ever.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._opened = False
        self._devices: tuple[_Device, ...] | None = None
        self._events: dict[int, Any] = {}

    def read(self, ids: Sequence[str]) -> tuple[GpuSample, ...]:
        """Return one sample for each id, as in CUDA_VISIBLE_DEVICES: an index in PCI order, GPU-<uuid> or MIG-<uuid>."""
        if not self._opened:
            self._open()
        if self._devices is None:
            return ()
        targets = [_target(self._library, self._devices, name) for name in ids]
        devices = {target.device.index: target.device for target in targets}
        xids = {index: self._xids(device) for index, device in devices.items()}
        return tuple(
            _sample(self._library, target).model_copy(update={"xids": xids[target.device.index]})
            for target in targets
        )

    def close(self) -> None:
        """Let the library go; more than once does no harm."""
        if self._devices is None:
            return
        self._devices = None
        for events in self._events.values():
            if events is not None:
                _quietly(self._library, self._library.nvmlEventSetFree, events)
        _quietly(self._library, self._library.nvmlShutdown)

    def _open(self) -> None:
        self._opened = True
        self._library = self._library or _imported()
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            log.debug("no GPU is measured: %s", error)
            return
        self._devices = ()
        try:
            self._devices = tuple(_devices(self._library))
        except self._library.NVMLError as error:
            log.debug("no GPU is measured: %s", error)

    def _xids(self, device: _Device) -> tuple[int, ...]:
        """Return a GPU's XID errors since the last call, of which the first only makes the driver keep them for us."""
        if device.handle is None:
            return ()
        if device.index not in self._events:
            self._events[device.index] = self._listen(device)
        events = self._events[device.index]
        return () if events is None else tuple(_waiting(self._library, events))

    def _listen(self, device: _Device) -> Any:
        """Return a set of events of this GPU alone: a lost GPU cannot be asked which one it is.

        None where the driver keeps no events (WSL, virtual GPUs).
        """
        ask = _Questions(self._library)
        events = ask("nvmlEventSetCreate")
        if events is not None:
            kind = self._library.nvmlEventTypeXidCriticalError
            ask("nvmlDeviceRegisterEvents", device.handle, kind, events)
        return events


def _waiting(library: Any, events: Any) -> Iterator[int]:
    ask = _Questions(library)
    for _ in range(MOST_EVENTS):
        event = ask("nvmlEventSetWait_v2", events, 0)
        if event is None:  # no more of them
            return
        yield int(event.eventData)


# The driver.


def _working(library: Any, module: str | None) -> Driver:
    ask = _Questions(library)
    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    return Driver(
        version=module or _text(ask("nvmlSystemGetDriverVersion"), None),
        library=_library_version(ask),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
    )


def _unusable(library: Any, error: Any, module: str | None) -> Driver:
    own = _library_version(_Questions(library))  # the library says that without a driver too
    return Driver(version=module, library=own, problem=_problem(library, error, module, own))


def _library_version(ask: _Questions) -> str | None:
    """Return NVML's version in the driver's form; in its own the CUDA it is of comes first (``12.550.54.14``)."""
    version: str | None = _text(ask("nvmlSystemGetNVMLVersion"), None)
    if version is None:
        return None
    first, _, rest = version.partition(".")
    return rest if len(first) < 3 and len(rest.partition(".")[0]) >= 3 else version


def _problem(library: Any, error: Any, module: str | None, own: str | None) -> str:
    """Say why the library is of no use, and what to do."""
    if error.value == library.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return (
            f"driver/library mismatch: the kernel module is {module or 'of another version'}, the library is "
            f"{own or 'of another'}: reload the module (rmmod, then modprobe nvidia) or reboot"
        )
    advice = {
        library.NVML_ERROR_LIBRARY_NOT_FOUND: (
            "libnvidia-ml.so.1 is not found: install the NVIDIA driver; in a container, "
            "start it with the driver's libraries (NVIDIA_DRIVER_CAPABILITIES with utility)"
        ),
        library.NVML_ERROR_DRIVER_NOT_LOADED: (
            "the kernel module nvidia is not loaded: install the driver for the running kernel, then modprobe nvidia"
        ),
        library.NVML_ERROR_NO_PERMISSION: "no permission to use the driver: look at the rights of /dev/nvidiactl",
    }
    return advice.get(error.value) or f"NVML cannot be used: {error}"


# GPUs.


@dataclass(frozen=True)
class _Device:
    """A GPU of the machine. ``handle`` is None, and ``fault`` says why, when the driver does not give it to us."""

    index: int
    uuid: str = UNKNOWN
    pci: str = UNKNOWN
    place: tuple[int, int, int] | None = None
    handle: Any = field(default=None, repr=False)
    fault: str | None = None


def _devices(library: Any) -> list[_Device]:
    """Return all GPUs in PCI order; raises NVMLError when the driver has none to count.

    NVML promises no order, though it has always been this one: a GPU whose address is not known keeps its place in it.
    """
    found = [_device(library, number) for number in range(library.nvmlDeviceGetCount())]
    if all(device.place is not None for device in found):
        found.sort(key=lambda device: device.place or ())
    return [replace(device, index=index) for index, device in enumerate(found)]


def _device(library: Any, number: int) -> _Device:
    ask = _Questions(library)
    handle = ask("nvmlDeviceGetHandleByIndex", number)
    if handle is None:
        return _Device(number, fault=ask.fault or "the driver does not give access to it")
    info = ask("nvmlDeviceGetPciInfo", handle)
    return _Device(
        number,
        uuid=_text(ask("nvmlDeviceGetUUID", handle)),
        pci=UNKNOWN if info is None else f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0",
        place=None if info is None else (info.domain, info.bus, info.device),
        handle=handle,
        fault=ask.fault,
    )


def _gpu(library: Any, device: _Device) -> Gpu:
    gpu = Gpu(
        index=device.index,
        uuid=device.uuid,
        model=UNKNOWN,
        memory_bytes=0,
        pci=device.pci,
        fault=device.fault,
    )
    return gpu if device.handle is None else _described(library, gpu, device.handle)


def _described(library: Any, gpu: Gpu, handle: Any) -> Gpu:
    ask = _Questions(library, fault=gpu.fault)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    uncorrected, since_load = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
    described = {
        "model": _text(ask("nvmlDeviceGetName", handle)),
        "memory_bytes": int(memory.total) if memory else 0,
        "mig": bool(mig and mig[0]),
        "ecc_errors": ask("nvmlDeviceGetTotalEccErrors", handle, uncorrected, since_load),
        "processes": _processes(ask, handle),
    }
    return gpu.model_copy(update={**described, "fault": ask.fault})


def _processes(ask: _Questions, handle: Any) -> tuple[GpuProcess, ...]:
    """Return the programs that compute on a GPU, clients of MPS among them. One that only shows pictures is none."""
    by_pid = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        for process in ask(function, handle) or ():
            memory = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
            by_pid[process.pid] = GpuProcess(pid=process.pid, name=UNKNOWN, memory_bytes=memory)
    return tuple(by_pid[pid] for pid in sorted(by_pid))


# Samples.


@dataclass(frozen=True)
class _Target:
    """What an id stands for: a GPU, or the ``part`` of it that is a MIG instance, which has a uuid of its own."""

    device: _Device
    uuid: str
    part: Any = field(default=None, repr=False)


def _target(library: Any, devices: Sequence[_Device], name: str) -> _Target:
    if name.startswith("MIG-"):
        return _mig_instance(library, devices, name)
    for device in devices:
        # CUDA takes the beginning of a uuid too.
        if str(device.index) == name or (name.startswith("GPU-") and device.uuid.startswith(name)):
            return _Target(device, device.uuid)
    return _missing(name)


def _mig_instance(library: Any, devices: Sequence[_Device], name: str) -> _Target:
    ask = _Questions(library)
    part = ask("nvmlDeviceGetHandleByUUID", name)
    whole = None if part is None else ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
    uuid = None if whole is None else _text(ask("nvmlDeviceGetUUID", whole))
    for device in devices:
        if device.uuid == uuid:
            return _Target(device, name, part)
    return _missing(name)


def _missing(name: str) -> _Target:
    index = int(name) if name.isdigit() else -1
    return _Target(_Device(index, fault="the driver knows no such GPU"), UNKNOWN if name.isdigit() else name)


def _sample(library: Any, target: _Target) -> GpuSample:
    if target.device.handle is None:
        return GpuSample(index=target.device.index, uuid=target.uuid, fault=target.device.fault)
    return _measured(library, target)


def _measured(library: Any, target: _Target) -> GpuSample:
    """Return what a GPU does. Of a MIG instance only the memory is its own; power and heat are those of its GPU."""
    ask = _Questions(library, fault=target.device.fault)
    whole = target.device.handle
    memory = ask("nvmlDeviceGetMemoryInfo", whole if target.part is None else target.part)
    rates = ask("nvmlDeviceGetUtilizationRates", whole) if target.part is None else None
    milliwatts = ask("nvmlDeviceGetPowerUsage", whole)
    sample = GpuSample(
        index=target.device.index,
        uuid=target.uuid,
        utilisation_percent=None if rates is None else float(rates.gpu),
        memory_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=ask("nvmlDeviceGetTemperature", whole, library.NVML_TEMPERATURE_GPU),
        throttled=_throttles(ask, whole),
    )
    return sample.model_copy(update={"fault": ask.fault})


def _throttles(ask: _Questions, handle: Any) -> tuple[str, ...]:
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # the name that it has in drivers before 535
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return tuple(word for bit, word in THROTTLES.items() if (bits or 0) & bit)


# Asking.


class _Questions:
    """Asks the library, one function at a time, and answers None to what it does not say.

    ``fault`` is the first refusal that means that something is wrong; what a GPU or driver just does not have is none.
    """

    def __init__(self, library: Any, fault: str | None = None) -> None:
        self._library = library
        self.fault = fault

    def __call__(self, function: str, *arguments: Any) -> Any:
        for candidate in self._candidates(function):
            try:
                return candidate(*arguments)
            except self._library.NVMLError as error:
                self._note(function, error)
                return None
            except self._library.NVMLLibraryMismatchError:
                continue  # an old driver has only an older version of the function
        return None

    def _candidates(self, function: str) -> Iterator[Callable[..., Any]]:
        """Give the function and its older version, as far as the binding has them."""
        for name in (function, f"{function}_v2"):
            found = getattr(self._library, name, None)
            if found is not None:
                yield found

    def _note(self, function: str, error: Any) -> None:
        if error.value not in _harmless(self._library):
            log.debug("%s: %s", function, error)
            self.fault = self.fault or _fault(self._library, function, error)


def _harmless(library: Any) -> tuple[int, ...]:
    return (
        library.NVML_ERROR_NOT_SUPPORTED,
        library.NVML_ERROR_FUNCTION_NOT_FOUND,
        library.NVML_ERROR_TIMEOUT,
        library.NVML_ERROR_NO_DATA,
    )


def _fault(library: Any, function: str, error: Any) -> str:
    """Say what is wrong with a GPU, and what to do where that is known."""
    advice = {
        library.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus: reboot the node",
        library.NVML_ERROR_RESET_REQUIRED: "it needs a reset: nvidia-smi --gpu-reset, or reboot the node",
    }
    topic = function.removeprefix("nvmlDeviceGet").removeprefix("nvml")
    return advice.get(error.value) or f"{topic}: {error}"


def _quietly(library: Any, function: Callable[..., None], *arguments: Any) -> None:
    """Call what tidies up: a driver that is gone has nothing left to tidy."""
    try:
        function(*arguments)
    except library.NVMLError as error:
        log.debug("%s", error)


def _text(value: Any, missing: Any = UNKNOWN) -> Any:
    """Return a string of the library, which old bindings give as bytes."""
    if value is None:
        return missing
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _imported() -> Any:
    import pynvml

    return pynvml
