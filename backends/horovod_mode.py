"""Horovod: a ``horovodrun`` line that runs once, on the launcher; the workers serve its ranks through ssh.

To everything but its name it is an mpi job with ``run_on: launcher``.
"""

from __future__ import annotations

from raycontrol.backends import mpi_mode
from raycontrol.plan import Brief, Facts, Plan
from raycontrol.spec import JobSpec, RunOn

leases = mpi_mode.leases
explain = mpi_mode.explain


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """Endpoints open, ssh is proved, the start command runs on the launcher."""
    return mpi_mode.plan(spec.model_copy(update={"run_on": RunOn.LAUNCHER}), brief, facts)
