"""``run`` and ``submit``: a spec becomes a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from raycontrol import extras
from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.cli.specs import Fields, read_spec
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.cli.follow import Inbox
    from raycontrol.client import JobHandle
    from raycontrol.spec import JobSpec

NO_CLUSTER = (
    "no Ray cluster found: start one with `ray start --head`, name one with --address, RAY_ADDRESS or RAYCONTROL_URL, "
    "or use `raycontrol run` without --detach, which starts Ray in its own process for the run"
)


def run(
    context: typer.Context,
    spec: options.Spec = None,
    sets: options.Set = None,
    env: options.Env = None,
    secret_env: options.SecretEnv = None,
    name: options.Name = None,
    mode: options.Mode = None,
    nodes: options.Nodes = None,
    cpu: options.Cpu = None,
    gpu: options.Gpu = None,
    memory: options.Memory = None,
    slots: options.Slots = None,
    working_dir: options.WorkingDir = None,
    placement: options.Placement = None,
    priority: options.Priority = None,
    after: options.After = None,
    array: options.Array = None,
    address: options.Address = None,
    detach: options.Detach = False,
    as_json: options.Json = False,
) -> None:
    """Submit a job, follow it to its end and exit with its status.

    Log lines go to stdout, progress to stderr. Ctrl-C (or SIGTERM) asks the job to stop and waits for its end; a
    second Ctrl-C leaves, and the job stops by itself. Closing the terminal leaves the job running.

    Without a Ray cluster one is started in this process for the run (an embedded run) and ends with it. Then
    closing the terminal or a second Ctrl-C ends the job too.

    \b
    Examples:
      raycontrol run job.yaml
      raycontrol run job.yaml --set groups.worker.count=4 --env LR=0.1
      raycontrol run --mode ddp --nodes 2 -- torchrun train.py
      raycontrol run --nodes 2 -- 'torchrun train.py | tee train.log'
      raycontrol run --array 0-99%8 -- 'python train.py --seed $RAYCONTROL_ARRAY_INDEX'
      raycontrol run --after ok:prepare-ab12cde -- python train.py
      raycontrol run --mode mpi --nodes 2 --slots 2 -- 'mpirun python train.py'

    \b
    Exit status:
      0 succeeded; the job's own code if it failed (128+n for signal n);
      124 a time limit; 125 raycontrol or the cluster failed;
      129 the terminal was closed; 130 stopped, or left by a second Ctrl-C;
      141 nobody reads the id or the JSON that is printed; 2 wrong usage or spec.
    """
    fields = Fields(
        name, mode, nodes, cpu, gpu, memory, slots, working_dir, placement, priority, after, array
    )
    services: Services = context.obj
    job_spec = read_spec(spec, services.words, fields, sets or [], env or [], secret_env or [])
    if detach:
        _submit(services, job_spec, address, as_json)
    else:
        raise typer.Exit(_run(services, job_spec, address, as_json))


def submit(
    context: typer.Context,
    spec: options.Spec = None,
    sets: options.Set = None,
    env: options.Env = None,
    secret_env: options.SecretEnv = None,
    name: options.Name = None,
    mode: options.Mode = None,
    nodes: options.Nodes = None,
    cpu: options.Cpu = None,
    gpu: options.Gpu = None,
    memory: options.Memory = None,
    slots: options.Slots = None,
    working_dir: options.WorkingDir = None,
    placement: options.Placement = None,
    priority: options.Priority = None,
    after: options.After = None,
    array: options.Array = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Submit a job and print its id; the job goes on by itself.

    \b
    Examples:
      raycontrol submit job.yaml
      id=$(raycontrol submit --nodes 2 --gpu 8 -- torchrun train.py)
      raycontrol logs -f "$id"
    """
    fields = Fields(
        name, mode, nodes, cpu, gpu, memory, slots, working_dir, placement, priority, after, array
    )
    services: Services = context.obj
    _submit(
        services,
        read_spec(spec, services.words, fields, sets or [], env or [], secret_env or []),
        address,
        as_json,
    )


def _submit(services: Services, spec: JobSpec, address: str | None, as_json: bool) -> None:
    from raycontrol.cli.follow import how_to_follow

    found = services.find_address(address)
    if found is None:
        extras.require("ray")
        raise UsageError(NO_CLUSTER)
    with services.client(found) as client:
        job = client.submit(spec, progress=services.out.note)
        if as_json:
            services.out.json(job.info().model_dump(mode="json"))
        else:
            services.out.line(job.id)
    services.out.note(f"submitted; {how_to_follow(job.id)}")


def _run(services: Services, spec: JobSpec, address: str | None, as_json: bool) -> int:
    from raycontrol.cli.follow import STOPPED, Signals, new_inbox

    out = services.out
    found = services.find_address(address)
    inbox = new_inbox()
    with services.client(found, embedded=found is None) as client, Signals(inbox, out) as signals:
        try:
            job = client.submit(spec, progress=out.note)
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C; or SIGTERM, while Ray's own handler stands
            out.note("raycontrol: left while submitting; `raycontrol list` shows if the job was accepted")
            return STOPPED
        signals.ready()
        way = {"embedded": found is None, "over_http": client.url is not None}
        return _follow(job, services, inbox, **way, as_json=as_json)


def _follow(
    job: JobHandle, services: Services, inbox: Inbox, *, embedded: bool, over_http: bool, as_json: bool
) -> int:
    from raycontrol.cli.follow import Follower, how_to_follow

    out = services.out
    later = "it ends with this command" if embedded else f"if this command goes away, {how_to_follow(job.id)}"
    out.note(f"[{job.id}] submitted; {later}")
    lines = out.note if as_json else out.log
    follower = Follower(job, out, inbox, lines=lines, embedded=embedded, over_http=over_http)
    status, info = follower.follow()
    if as_json and info is not None:
        out.json(info.model_dump(mode="json"))
    return status
