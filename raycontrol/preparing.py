"""What an instance finds out about itself before there is a plan."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from raycontrol import nodeenv, nodefacts
from raycontrol.disk import TEMP_LINK, short_folder
from raycontrol.hardware import essentials
from raycontrol.links import Identity, Links
from raycontrol.logs import OutputFolders
from raycontrol.plan import Facts
from raycontrol.sharedprobe import make_folder
from raycontrol.shellenv import ShellEnv, merged
from raycontrol.spec import Resources


@dataclass(frozen=True)
class Preparation:
    """What an instance needs before the plan is made: the packed working directory, ports of its node, an ssh endpoint.

    ``ray_node``: what a Ray node of the job's own, which the instance will start, may use of the machine. A GPU of the
    instance that has been idle for ``idle_gpu_warn_s`` seconds while its runs live is told of (0: never). ``rdma``: the job
    may come to use RDMA, so that its plan needs to know the node's ports and interfaces.
    ``shared_dir`` is a folder that is proved to be shared by all nodes, ``not_shared`` why the one that was named is not.
    ``shell_env``: it starts from what the node's shell sets.
    """

    package: str | None
    leases: tuple[str, ...]
    ssh: bool = False
    ray_node: Resources | None = None
    idle_gpu_warn_s: float = 0.0
    rdma: bool = False
    shared_dir: str | None = None
    not_shared: str | None = None
    shell_env: bool = False

    def outputs(self, me: Identity) -> Path:
        """Return where the instance's outputs go."""
        if self.shared_dir is None:
            return me.outputs
        return OutputFolders(self.shared_dir, me.job_id).of(me.instance)


def with_outputs(me: Identity, order: Preparation) -> Preparation:
    """Make the folder of the instance's outputs, and return what is true of it: the shared folder may have gone since it was proved."""
    if order.shared_dir is None:
        order.outputs(me).mkdir(parents=True, exist_ok=True)
        return order
    try:
        make_folder(order.shared_dir, order.outputs(me))
    except OSError as error:
        why = f"shared_dir {order.shared_dir} cannot be used on {me.node_name} any more: {error.strerror or error}"
        return with_outputs(me, replace(order, shared_dir=None, not_shared=why))
    return order


async def collect(me: Identity, links: Links, order: Preparation, probe_port: int) -> Facts:
    """Fetch code, lease ports, ask the node; return all but what ssh adds. ``probe_port``: where we can be reached."""
    ports = {"probe": str(probe_port)}
    for purpose in order.leases:
        ports[purpose] = str(await links.lease_port(purpose))
    code_dir, node = await asyncio.gather(links.code_dir(order.package), links.node_facts())
    facts = Facts(
        instance=me.instance,
        ip=me.ip,
        node_name=me.node_name,
        ports=ports,
        gpus=me.gpus,
        interface=nodefacts.interface_of(me.ip),
        network=nodefacts.network_of(me.ip),
        code_dir=code_dir,
        output_dir=str(order.outputs(me)),
        shared_outputs=order.shared_dir is not None,
        private_dir=str(me.folder),
        python=sys.executable,
        package_dir=str(Path(__file__).parent),
        root=os.geteuid() == 0,
        hardware=essentials(node, me.node_gpus, network=order.rdma),
    )
    if order.shell_env:
        facts = _with_shell(facts, me, await links.shell_env())
    if order.ray_node is None:
        return facts
    return await asyncio.to_thread(_with_room_for_ray, facts, me, order.ray_node)


def _with_shell(facts: Facts, me: Identity, shell: ShellEnv) -> Facts:
    """Say what the shell makes of the node's variables; our own Python stays first on PATH, as in every job."""
    variables = merged(shell.variables, nodeenv.raylet_environment(me.raylet_pid))
    if "PATH" in variables:
        variables["PATH"] = nodeenv.search_path(variables, str(Path(sys.executable).parent))
    return replace(facts, shell_env=variables, shell_trouble=shell.trouble)


def _with_room_for_ray(facts: Facts, me: Identity, resources: Resources) -> Facts:
    """Make a folder for Ray's sockets and say how much memory a Ray node here may have."""
    memory = resources.memory or nodefacts.memory_of_cpus(resources.cpu)
    return replace(
        facts,
        temp_dir=str(short_folder(me.folder / TEMP_LINK)),
        memory=str(memory),
        object_store=str(nodefacts.object_store_of(memory)),
    )
