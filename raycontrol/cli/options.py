"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


def at_least(least: int) -> Callable[[float | None], float | None]:
    """Return a check for a number's option; typer's own ``min`` would print ``[x>=0]`` in the help."""

    def check(value: float | None) -> float | None:
        if value is not None and not value >= least:
            raise typer.BadParameter(f"must be at least {least}, got {value:g}")
        return value

    return check


Spec = Annotated[
    str | None,
    typer.Argument(
        metavar="SPEC",
        help="A YAML or JSON file (- is stdin). After `--` stands the start command itself, instead of a file or of "
        "the file's own command: one word is a line for bash, several are run without a shell.",
        show_default=False,
    ),
]
JobId = Annotated[
    str, typer.Argument(metavar="ID", help="The job's id, or the beginning of it.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="IP:PORT",
        help="The Ray cluster; default: the one behind RAYCONTROL_URL, else RAY_ADDRESS, else one that runs on this machine.",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set any field of the spec, by the rules of YAML: --set groups.worker.count=4. May be repeated.",
        show_default=False,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="K=V",
        help="Set a variable of the job; always text. May be repeated.",
        show_default=False,
    ),
]
SecretEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-env",
        metavar="NAME",
        help="Give the job this variable with the value that it has here; the value is shown and logged nowhere. "
        "May be repeated.",
        show_default=False,
    ),
]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="The job's name.", show_default=False)]
Mode = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="ddp, mpi, horovod, ps or ray.  [default: ddp]", show_default=False),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Instances; each on a node of its own unless --placement pack; 2-4: as many of these as fit.  [default: 1]",
        show_default=False,
    ),
]
Cpu = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="CPUs that Ray reserves per instance; no limit on what its processes use.  [default: 1]",
        show_default=False,
    ),
]
Gpu = Annotated[
    float | None, typer.Option(metavar="N", help="GPUs per instance.  [default: 0]", show_default=False)
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory that Ray reserves per instance, such as 8GiB; no limit on what its processes use.",
        show_default=False,
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes per instance.  [default: its GPUs, or 1 without GPUs]",
        show_default=False,
    ),
]
WorkingDir = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="The folder that the job gets a copy of. Without a spec and this option it is the current folder if "
        "the command names a file in it, else none.",
        show_default=False,
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="strict: one instance a node; pack: several may share one.  [default: strict]",
        show_default=False,
    ),
]
Array = Annotated[
    str | None,
    typer.Option(
        metavar="INDICES[%N]",
        help="One job with a member for each index, such as 0-99 or 0-15:4,20, at most N at a time; "
        "each finds its own in RAYCONTROL_ARRAY_INDEX.",
        show_default=False,
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ok:|any:|failed:]ID",
        help="Wait until that job has succeeded (ok, the default), ended (any) or failed. May be repeated.",
        show_default=False,
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="0 (comes first) to 9.  [default: 5]",
        show_default=False,
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not follow: print the job's id and return.")]
