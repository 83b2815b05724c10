"""What NVIDIA's library says of GPUs, whole and broken."""

from __future__ import annotations

import pynvml
import pytest

from raycontrol.hardware import Driver, Gpu, GpuProcess, GpuSample
from raycontrol.nvml import Meter, describe
from tests.unit.fake_nvml import GIB, Card, FakeNvml, OldDriver

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
C = "GPU-cccccccc-0000-0000-0000-000000000000"
PART = "MIG-11111111-0000-0000-0000-000000000000"


# What there is.


def test_a_driver_and_its_gpus_are_described() -> None:
    library = FakeNvml(Card(A, bus=0x65, domain=1, ecc_errors=2, computing={4711: 3 * GIB, 4712: None}))
    assert describe("550.54.14", library) == (
        Driver(version="550.54.14", library="550.54.14", cuda="12.4"),
        (
            Gpu(
                index=0,
                uuid=A,
                model="NVIDIA A100-SXM4-80GB",
                memory_bytes=85899345920,
                pci="0001:65:00.0",
                ecc_errors=2,
                processes=(
                    GpuProcess(pid=4711, name="?", memory_bytes=3221225472),
                    GpuProcess(pid=4712, name="?", memory_bytes=None),
                ),
            ),
        ),
    )
    assert library.inits == 0


def test_gpus_are_in_the_order_of_their_addresses() -> None:
    library = FakeNvml(Card(A, bus=0x90), Card(B, bus=0x10), Card(C, domain=1, bus=0x01))
    _, gpus = describe(None, library)
    assert [(gpu.index, gpu.uuid, gpu.pci) for gpu in gpus] == [
        (0, B, "0000:10:00.0"),
        (1, A, "0000:90:00.0"),
        (2, C, "0001:01:00.0"),
    ]


def test_strings_of_old_bindings_are_bytes() -> None:
    driver, (gpu,) = describe(None, FakeNvml(Card(A), old=True))
    assert (driver.version, driver.library) == ("550.54.14", "550.54.14")
    assert (gpu.uuid, gpu.model) == (A, "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("12.550.54.14", "550.54.14"),
        ("11.525.85", "525.85"),
        ("10.440.33.01", "440.33.01"),
        ("352.39", "352.39"),
    ],
)
def test_the_librarys_version_is_shown_in_the_drivers_form(said: str, shown: str) -> None:
    assert describe(None, FakeNvml(library=said))[0].library == shown


def test_a_gpu_that_is_cut_up_says_so() -> None:
    _, (whole, cut, never) = describe(
        None, FakeNvml(Card(A, bus=1), Card(B, bus=2, mig=True), Card(C, bus=3, mig=None))
    )
    assert (whole.mig, cut.mig, never.mig) == (False, True, False)


def test_what_a_gpu_does_not_have_is_no_fault() -> None:
    refuses = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}  # one that shares the CPU's memory
    _, (gpu,) = describe(None, FakeNvml(Card(A, ecc_errors=None, mig=None, refuses=refuses)))
    assert (gpu.memory_bytes, gpu.ecc_errors, gpu.mig, gpu.fault) == (0, None, False, None)


def test_clients_of_mps_are_processes_too() -> None:
    _, (gpu,) = describe(None, FakeNvml(Card(A, computing={30: GIB}, mps_clients={20: 2 * GIB, 30: GIB})))
    assert gpu.processes == (
        GpuProcess(pid=20, name="?", memory_bytes=2147483648),
        GpuProcess(pid=30, name="?", memory_bytes=1073741824),
    )


def test_an_old_driver_lists_processes_in_its_own_way() -> None:
    _, (gpu,) = describe(None, OldDriver(Card(A, computing={30: GIB})))
    assert (gpu.processes, gpu.fault) == ((GpuProcess(pid=30, name="?", memory_bytes=1073741824),), None)


def test_processes_that_may_not_be_seen_are_a_fault() -> None:
    refuses = {"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
    _, (gpu,) = describe(None, FakeNvml(Card(A, mig=True, refuses=refuses)))
    assert (gpu.processes, gpu.fault) == ((), "ComputeRunningProcesses: Insufficient Permissions")


def test_a_lost_gpu_leaves_the_others() -> None:
    library = FakeNvml(Card(A, bus=1), Card(B, bus=2, lost=True), Card(C, bus=3))
    driver, gpus = describe(None, library)
    assert driver.problem is None
    assert [(gpu.index, gpu.uuid, gpu.fault) for gpu in gpus] == [
        (0, A, None),
        (1, "?", "it has fallen off the bus: reboot the node"),
        (2, C, None),
    ]


def test_a_gpu_that_needs_a_reset_keeps_what_is_known_of_it() -> None:
    refuses = {"nvmlDeviceGetTotalEccErrors": pynvml.NVML_ERROR_RESET_REQUIRED}
    _, (gpu,) = describe(None, FakeNvml(Card(A, refuses=refuses)))
    assert (gpu.model, gpu.ecc_errors) == ("NVIDIA A100-SXM4-80GB", None)
    assert gpu.fault == "it needs a reset: nvidia-smi --gpu-reset, or reboot the node"


@pytest.mark.parametrize(
    ("error", "module", "problem"),
    [
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            "550.54.14",
            "driver/library mismatch: the kernel module is 550.54.14, the library is 550.90.07: "
            "reload the module (rmmod, then modprobe nvidia) or reboot",
        ),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            None,
            "driver/library mismatch: the kernel module is of another version, the library is 550.90.07: "
            "reload the module (rmmod, then modprobe nvidia) or reboot",
        ),
        (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            None,
            "the kernel module nvidia is not loaded: install the driver for the running kernel, then modprobe nvidia",
        ),
        (
            pynvml.NVML_ERROR_NO_PERMISSION,
            "550.54.14",
            "no permission to use the driver: look at the rights of /dev/nvidiactl",
        ),
        (pynvml.NVML_ERROR_UNKNOWN, "550.54.14", "NVML cannot be used: Unknown Error"),
    ],
)
def test_a_driver_that_cannot_be_used_says_what_to_do(error: int, module: str | None, problem: str) -> None:
    library = FakeNvml(Card(A), library="12.550.90.07", refuses={"nvmlInit": error})
    assert describe(module, library) == (Driver(version=module, library="550.90.07", problem=problem), ())


def test_a_node_without_the_library_says_how_to_get_it() -> None:
    library = FakeNvml(refuses={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    driver, gpus = describe(None, library)
    assert (driver.version, driver.library, gpus) == (None, None, ())
    assert driver.problem is not None
    assert driver.problem.startswith("libnvidia-ml.so.1 is not found: install the NVIDIA driver")


def test_a_driver_that_cannot_count_its_gpus_is_closed_again() -> None:
    library = FakeNvml(Card(A), refuses={"nvmlDeviceGetCount": pynvml.NVML_ERROR_UNKNOWN})
    driver, gpus = describe(None, library)
    assert (driver.problem, gpus) == ("NVML cannot be used: Unknown Error", ())
    assert library.inits == 0


# What they do.


def test_a_gpu_is_measured() -> None:
    card = Card(
        A, used=20 * GIB, busy_percent=97, milliwatts=398_250, celsius=71, throttle_bits=0x4 | 0x40 | 0x1
    )
    meter = Meter(FakeNvml(card))
    assert meter.read(["0"]) == (
        GpuSample(
            index=0,
            uuid=A,
            utilisation_percent=97.0,
            memory_bytes=21474836480,
            memory_total_bytes=85899345920,
            power_w=398.25,
            temperature_c=71.0,
            throttled=("power cap", "hardware thermal slowdown"),
        ),
    )


def test_a_meter_opens_the_library_once_and_closes_it_once() -> None:
    library = FakeNvml(Card(A))
    meter = Meter(library)
    assert library.inits == 0
    meter.read(["0"])
    meter.read(["0"])
    assert (library.inits, len(library.event_sets)) == (1, 1)
    meter.close()
    meter.close()
    assert (library.inits, len(library.event_sets)) == (0, 0)
    assert meter.read(["0"]) == ()


def test_ids_are_those_of_cuda_visible_devices() -> None:
    meter = Meter(FakeNvml(Card(A, bus=0x90), Card(B, bus=0x10)))
    samples = meter.read(["1", A, "GPU-bbbbbbbb"])
    assert [(sample.index, sample.uuid) for sample in samples] == [(1, A), (1, A), (0, B)]


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("7", GpuSample(index=7, uuid="?", fault="the driver knows no such GPU")),
        (C, GpuSample(index=-1, uuid=C, fault="the driver knows no such GPU")),
        (PART, GpuSample(index=-1, uuid=PART, fault="the driver knows no such GPU")),
    ],
)
def test_an_id_that_the_driver_does_not_know_is_a_fault(name: str, sample: GpuSample) -> None:
    assert Meter(FakeNvml(Card(A))).read([name]) == (sample,)


def test_a_part_of_a_gpu_has_memory_of_its_own() -> None:
    card = Card(B, bus=2, mig=True, used=30 * GIB, milliwatts=200_000, parts={PART: (10 * GIB, 4 * GIB)})
    meter = Meter(FakeNvml(Card(A, bus=1), card))
    (sample,) = meter.read([PART])
    assert (sample.index, sample.uuid) == (1, PART)
    assert (sample.memory_bytes, sample.memory_total_bytes) == (4294967296, 10737418240)
    assert (sample.utilisation_percent, sample.power_w, sample.fault) == (None, 200.0, None)


def test_a_gpu_that_is_cut_up_has_no_utilisation() -> None:
    (sample,) = Meter(FakeNvml(Card(A, mig=True, used=GIB))).read(["0"])
    assert (sample.utilisation_percent, sample.memory_bytes, sample.fault) == (None, 1073741824, None)


def test_what_a_gpu_cannot_measure_is_left_out() -> None:
    card = Card(A, busy_percent=None, milliwatts=None, celsius=None, throttle_bits=None)
    (sample,) = Meter(FakeNvml(card)).read(["0"])
    assert sample == GpuSample(index=0, uuid=A, memory_bytes=0, memory_total_bytes=85899345920)


def test_a_gpu_that_is_lost_while_it_runs_leaves_the_others() -> None:
    first, second = Card(A, bus=1, busy_percent=50), Card(B, bus=2, busy_percent=60)
    meter = Meter(FakeNvml(first, second))
    meter.read(["0", "1"])
    first.lost = True
    lost, other = meter.read(["0", "1"])
    assert lost == GpuSample(index=0, uuid=A, fault="it has fallen off the bus: reboot the node")
    assert (other.utilisation_percent, other.fault) == (60.0, None)


def test_a_gpu_that_was_lost_before_is_a_fault() -> None:
    (sample,) = Meter(FakeNvml(Card(A, lost=True))).read(["0"])
    assert sample == GpuSample(index=0, uuid="?", fault="it has fallen off the bus: reboot the node")


def test_xid_errors_are_told_once_with_their_gpu() -> None:
    first, second = Card(A, bus=1), Card(B, bus=2)
    library = FakeNvml(first, second)
    meter = Meter(library)
    assert [sample.xids for sample in meter.read(["0", "1"])] == [(), ()]
    library.happen(second, 79)
    library.happen(second, 31)
    assert [sample.xids for sample in meter.read(["0", "1"])] == [(), (79, 31)]
    assert [sample.xids for sample in meter.read(["0", "1"])] == [(), ()]


def test_the_error_that_ends_a_gpu_is_told_too() -> None:
    card = Card(A)
    library = FakeNvml(card, Card(B, bus=0x20))
    meter = Meter(library)
    meter.read(["0"])
    library.happen(card, 79)
    card.lost = True
    (sample,) = meter.read(["0"])
    assert (sample.xids, sample.fault) == ((79,), "it has fallen off the bus: reboot the node")


def test_a_driver_that_tells_of_no_xid_errors_is_no_fault() -> None:
    library = FakeNvml(Card(A), refuses={"nvmlEventSetCreate": pynvml.NVML_ERROR_NOT_SUPPORTED})
    (sample,) = Meter(library).read(["0"])
    assert (sample.xids, sample.fault) == ((), None)


def test_a_node_without_a_driver_has_nothing_to_measure() -> None:
    library = FakeNvml(refuses={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    meter = Meter(library)
    assert meter.read(["0"]) == ()
    meter.close()
    assert library.inits == 0


def test_the_real_library_says_something_on_any_machine() -> None:
    driver, gpus = describe()
    meter = Meter()
    samples = meter.read([str(gpu.index) for gpu in gpus] or ["0"])
    meter.close()
    if driver.problem is not None:
        assert (gpus, samples) == ((), ())
    else:
        assert [sample.uuid for sample in samples] == [gpu.uuid for gpu in gpus] or not gpus
