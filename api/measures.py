"""Figures for Prometheus: what this server does, counted here, and what the cluster does, asked for at every scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from raycontrol import status
from raycontrol.hardware import GpuSample, InstanceUsage
from raycontrol.status import JobInfo, Metrics

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STALE_S = 60.0
"""A GPU's sample that is older tells nothing of now."""


@dataclass(frozen=True)
class GpuUse:
    """A GPU's last sample, and the node that it is of."""

    node: str
    sample: GpuSample


class Measures:
    """``answered`` counts; ``text`` is what Prometheus reads."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._latency = Histogram(
            "raycontrol_http_request_seconds",
            "Time from a request until its answer was sent; of a stream, until it ended.",
            ("method", "route", "status"),
            buckets=LATENCIES_S,
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, took_s: float) -> None:
        known = method if method in KNOWN_METHODS else "other"
        self._latency.labels(known, route, str(status)).observe(took_s)

    def text(self, metrics: Metrics, gpus: Iterable[GpuUse], followers: int) -> bytes:
        cluster = CollectorRegistry()
        cluster.register(_Families([*_job_families(metrics), *_gpu_families(gpus), _followers(followers)]))
        return generate_latest(self._registry) + generate_latest(cluster)


KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


def gpus_of(job: JobInfo, samples: Mapping[str, tuple[InstanceUsage, ...]]) -> list[GpuUse]:
    """Return the last samples of a running job's GPUs, if they are of now."""
    nodes = {item.name: item.node for item in job.instances}
    fresh = {
        name: found[-1] for name, found in samples.items() if found and time.time() - found[-1].at < STALE_S
    }
    return [GpuUse(nodes.get(name, ""), gpu) for name, last in fresh.items() for gpu in last.gpus]


class _Families:
    """What prometheus_client calls a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _job_families(metrics: Metrics) -> list[Metric]:
    jobs = GaugeMetricFamily("raycontrol_jobs", "Jobs that the store keeps, by state.", labels=("state",))
    for state, count in metrics.jobs.items():
        jobs.add_metric((str(state),), count)
    attempts = GaugeMetricFamily(
        "raycontrol_attempts", "Attempts that got nodes, of the jobs kept.", metrics.attempts
    )
    endings = GaugeMetricFamily(
        "raycontrol_endings", "Ended jobs that are kept, by reason.", labels=("reason",)
    )
    for reason, count in metrics.endings.items():
        endings.add_metric((str(reason),), count)
    waits = _histogram(
        "raycontrol_queue_wait_seconds", "From a submission until nodes were chosen.", metrics.queue_wait_s
    )
    launches = _histogram(
        "raycontrol_launch_seconds", "From the choice of nodes until start commands ran.", metrics.launch_s
    )
    return [jobs, attempts, endings, waits, launches]


def _histogram(name: str, text: str, of: status.Histogram) -> Metric:
    buckets = [*((f"{bound:g}", count) for bound, count in of.buckets), ("+Inf", of.count)]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=of.sum_s)


def _gpu_families(gpus: Iterable[GpuUse]) -> list[Metric]:
    labels = ("node", "gpu")
    use = GaugeMetricFamily("raycontrol_gpu_utilisation_percent", "Of GPUs that jobs have.", labels=labels)
    memory = GaugeMetricFamily("raycontrol_gpu_memory_bytes", "Held on GPUs that jobs have.", labels=labels)
    # Jobs may share a GPU; it is shown once.
    for (node, index), sample in {(gpu.node, gpu.sample.index): gpu.sample for gpu in gpus}.items():
        if sample.utilisation_percent is not None:
            use.add_metric((node, str(index)), sample.utilisation_percent)
        if sample.memory_bytes is not None:
            memory.add_metric((node, str(index)), sample.memory_bytes)
    return [use, memory]


def _followers(count: int) -> Metric:
    return GaugeMetricFamily(
        "raycontrol_followers", "Streams and long polls that wait on this server.", count
    )
