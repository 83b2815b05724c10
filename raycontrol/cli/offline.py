"""The commands that need neither a cluster nor Ray: ``plan``, ``env``, ``ray-env``, ``schema``, ``version``."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.cli.specs import Fields, read_spec
from raycontrol.errors import UsageError
from raycontrol.version import __version__

if TYPE_CHECKING:
    from raycontrol.spec import Mode


def plan(
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
    as_json: options.Json = False,
) -> None:
    """Print what a job would do, instance by instance: environment, files, commands and their order.

    Starts nothing and needs no cluster; what only a cluster knows is written as <ip of worker-0>.

    \b
    Examples:
      raycontrol plan job.yaml
      raycontrol plan --nodes 2 --gpu 8 -- torchrun train.py
    """
    from raycontrol import backends
    from raycontrol import plan as plans
    from raycontrol.settings import Settings

    services: Services = context.obj
    fields = Fields(name, mode, nodes, cpu, gpu, memory, slots, working_dir, placement, priority)
    job = read_spec(spec, services.words, fields, sets or [], env or [], secret_env or [])
    made = backends.plan_of(job.settled(Settings.load().site))
    if as_json:
        services.out.json(plans.to_json(made))
    else:
        services.out.line(plans.render(made))


def env(
    context: typer.Context,
    mode: Annotated[str, typer.Option(metavar="MODE", help="ddp, mpi, horovod, ps or ray.")] = "ddp",
    as_json: options.Json = False,
) -> None:
    """Print `export` lines for this machine alone, to try a training script without a job.

    \b
    Examples:
      raycontrol env --mode ddp
      eval "$(raycontrol env)" && torchrun train.py
    """
    from raycontrol import backends

    _exports(context.obj, backends.local_environment(_mode(mode)), as_json)


def ray_env(
    context: typer.Context,
    head: Annotated[bool, typer.Option("--head", help="Those for the head, too.")] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="With --head: keep Ray's tables on disk, here, so that jobs on other nodes outlive a head that comes "
            "back within a minute.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print `export` lines of the settings that `ray start` should be given: losses are seen and jobs start sooner.

    What each does is in docs/operations.md; `raycontrol doctor` says what a running cluster lacks of them. In
    parentheses, as below, they are set for that Ray alone.

    \b
    Examples:
      raycontrol ray-env --head
      (eval "$(raycontrol ray-env --head)" && ray start --head)
      (eval "$(raycontrol ray-env)" && ray start --address=HEAD_IP:6379)
    """
    from raycontrol import raysettings

    if storage is not None and not (head and storage):
        raise UsageError("--storage: goes with --head and names a folder: only the head keeps Ray's tables")
    folder = None if storage is None else str(Path(storage).expanduser().absolute())
    found = raysettings.variables(head=head, storage=folder, is_installed=_is_installed)
    _exports(context.obj, found, as_json)


def schema(context: typer.Context, as_json: options.Json = False) -> None:
    """Print the JSON Schema of a spec, for editors and other programs (it is JSON with and without --json).

    \b
    Example:
      raycontrol schema > job.schema.json
    """
    from raycontrol import spec

    services: Services = context.obj
    services.out.json(spec.schema())


def version(context: typer.Context, as_json: options.Json = False) -> None:
    """Print the version of raycontrol.

    \b
    Example:
      raycontrol version
    """
    services: Services = context.obj
    if as_json:
        services.out.json({"raycontrol": __version__})
    else:
        services.out.line(f"raycontrol {__version__}")


def _exports(services: Services, variables: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        services.out.json(variables)
        return
    for key, value in variables.items():
        services.out.line(f"export {key}={shlex.quote(value)}")


def _is_installed(module: str) -> bool:
    """Whether the package that the module is in is there; nothing is imported for it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _mode(word: str) -> Mode:
    from raycontrol.spec import Mode

    if word not in [mode.value for mode in Mode]:
        raise UsageError(f"--mode: must be one of {', '.join(Mode)}, got {word}")
    return Mode(word)
