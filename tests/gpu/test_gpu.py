"""What a node with NVIDIA GPUs says of them, beside what ``nvidia-smi`` says; ``pytest -m gpu`` where there are some."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.hardware import GpuSample, NodeFacts
from raycontrol.nodefacts import collect, installed
from raycontrol.nvml import Meter, describe
from tests.support import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
UNSAID = ("[N/A]", "[Not Supported]", "N/A", "[GPU requires reset]")
FILL = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for call, arguments in (
    (cuda.cuInit, (0,)),
    (cuda.cuDeviceGet, (ctypes.byref(device), 0)),
    (cuda.cuCtxCreate_v2, (ctypes.byref(context), 0, device)),
    (cuda.cuMemAlloc_v2, (ctypes.byref(memory), ctypes.c_size_t(256 << 20))),
):
    assert call(*arguments) == 0, call
print("filled", flush=True)
sys.stdin.read()
"""
"""Holds 256 MiB of the first GPU that it sees until its standard input is closed."""


def nvidia_smi(*fields: str) -> list[dict[str, str | None]]:
    """Return one row per GPU, in the driver's order; None is what it does not say."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    rows = csv.reader(told.splitlines(), skipinitialspace=True)
    return [
        {field: None if value in UNSAID else value for field, value in zip(fields, row, strict=True)}
        for row in rows
    ]


@pytest.fixture
def facts(tmp_path: Path) -> NodeFacts:
    return collect(tmp_path, "127.0.0.1", environ=dict(os.environ), installed=installed(os.environ))


@pytest.fixture
def meter() -> Iterator[Meter]:
    meter = Meter()
    yield meter
    meter.close()


@pytest.fixture
def filler() -> Iterator[subprocess.Popen[str]]:
    """A process that holds memory of GPU 0 and carries the mark of an attempt."""
    environment = {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
        "RAYCONTROL_ATTEMPT_ID": "test-gpu.1",
    }
    with subprocess.Popen(
        ["python3", "-c", FILL],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "filled\n"
            yield process
        finally:
            process.stdin.close()


def test_the_driver_has_no_problem(facts: NodeFacts) -> None:
    row = nvidia_smi("driver_version")[0]
    assert facts.driver.problem is None
    assert facts.driver.version == facts.driver.library == row["driver_version"]
    assert facts.driver.cuda is not None


def test_gpus_are_those_of_nvidia_smi_in_pci_order(facts: NodeFacts) -> None:
    fields = ("uuid", "name", "memory.total", "pci.domain", "pci.bus", "pci.device", "mig.mode.current")
    rows = sorted(
        nvidia_smi(*fields),
        key=lambda row: [int(row[part] or "0", 16) for part in ("pci.domain", "pci.bus", "pci.device")],
    )
    assert [gpu.index for gpu in facts.gpus] == list(range(len(rows)))
    assert [(gpu.uuid, gpu.model, gpu.mig) for gpu in facts.gpus] == [
        (row["uuid"], row["name"], row["mig.mode.current"] == "Enabled") for row in rows
    ]
    for gpu, row in zip(facts.gpus, rows, strict=True):
        assert gpu.fault is None
        # nvidia-smi and the first version of the call differ in what the driver keeps for itself.
        if row["memory.total"]:
            assert gpu.memory_bytes == pytest.approx(float(row["memory.total"]) * MIB, rel=0.02)
        assert gpu.pci == (
            f"{int(row['pci.domain'] or '0', 16):04x}:{int(row['pci.bus'] or '0', 16):02x}"
            f":{int(row['pci.device'] or '0', 16):02x}.0"
        )


def test_memory_errors_are_those_of_nvidia_smi(facts: NodeFacts) -> None:
    told = {row["uuid"]: row for row in nvidia_smi("uuid", "ecc.errors.uncorrected.volatile.total")}
    for gpu in facts.gpus:
        count = told[gpu.uuid]["ecc.errors.uncorrected.volatile.total"]
        assert gpu.ecc_errors == (None if count is None else int(count))


def test_a_gpu_is_measured_as_nvidia_smi_measures_it(meter: Meter) -> None:
    _, gpus = describe()
    samples = meter.read([str(gpu.index) for gpu in gpus])
    told = {
        row["uuid"]: row
        for row in nvidia_smi("uuid", "memory.used", "power.draw", "temperature.gpu", "utilization.gpu")
    }
    assert [sample.uuid for sample in samples] == [gpu.uuid for gpu in gpus]
    for sample in samples:
        row = told[sample.uuid]
        assert sample.fault is None
        assert (sample.power_w is None) == (row["power.draw"] is None)
        assert (sample.utilisation_percent is None) == (row["utilization.gpu"] is None)
        if sample.temperature_c is not None:
            assert sample.temperature_c == pytest.approx(float(row["temperature.gpu"] or 0), abs=10)
        if sample.utilisation_percent is not None:
            assert 0 <= sample.utilisation_percent <= 100


def test_a_uuid_names_the_same_gpu_as_its_index(meter: Meter) -> None:
    _, gpus = describe()
    by_index = meter.read([str(gpu.index) for gpu in gpus])
    by_uuid = meter.read([gpu.uuid for gpu in gpus])
    assert [(one.index, one.uuid) for one in by_index] == [(one.index, one.uuid) for one in by_uuid]


def test_a_process_on_a_gpu_is_seen_with_its_attempt(
    filler: subprocess.Popen[str], meter: Meter, tmp_path: Path
) -> None:
    """In a container the driver may not tell the pids of this namespace: then the memory alone is seen."""
    sample = wait_until(lambda: filled(meter), 20, "256 MiB in use on GPU 0")
    assert sample.fault is None
    found = collect(tmp_path, "127.0.0.1", environ=dict(os.environ), installed=installed(os.environ))
    processes = {process.pid: process for process in found.gpus[0].processes}
    if filler.pid not in processes:
        pytest.skip(f"the driver tells other pids here: {sorted(processes)}")
    assert processes[filler.pid].attempt_id == "test-gpu.1"
    assert processes[filler.pid].name.startswith("python3")


def filled(meter: Meter) -> GpuSample | None:
    (sample,) = meter.read(["0"])
    return sample if (sample.memory_bytes or 0) >= 256 * MIB else None
