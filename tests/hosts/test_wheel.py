"""Three hosts that have nothing of the checkout: Ray and raycontrol come from the wheel's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wheels
from tests.cluster_state import nothing_left
from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts

SAYS = "import raycontrol.instance as m, os; print(m.__file__, os.environ['INDEX'])"


@pytest.mark.long
def test_a_job_over_three_hosts_from_the_installed_wheel(needs_hosts: None, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    packages = wheels.install(wheels.build(tmp_path / "sources"), venv)
    with Hosts(3, keep=[tmp_path]) as hosts:
        hosts.start_cluster(ray=venv / "bin/ray")
        cluster = Cluster(hosts, tmp_path / "home")
        try:
            command = [venv / "bin/raycontrol", "run", "--nodes", "3", "--", "python", "-c", SAYS]
            hosts.run(
                2, command, env=cluster.env, check=True, timeout_s=200
            )  # the controller stays from now on
            with nothing_left(cluster):
                ran = hosts.run(1, command, env=cluster.env, check=True, timeout_s=200)
        finally:
            cluster.close()
    module = packages / "raycontrol/instance.py"
    assert sorted(ran.stdout.splitlines()) == [
        f"master-0 | {module} 0",
        f"worker-0 | {module} 1",
        f"worker-1 | {module} 2",
    ]
