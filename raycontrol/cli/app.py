"""The table of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from raycontrol.cli import (
    controller,
    draining,
    execute,
    jobs,
    nodes,
    offline,
    outputs,
    queueing,
    run,
    serve,
    shell,
    token,
    top,
)


class WithCommand(TyperCommand):
    """A command of ours that takes a job's own command after ``--`` (``cli.split_words`` has taken it before typer looks)."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,  # plain help: it costs no import, and is as readable in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
controller_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the cluster's controller, or replace it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

outputs_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What a job has left in $RAYCONTROL_OUTPUT_DIR.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

node_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at one node of the cluster; say which nodes take jobs, and group them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

group_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Groups of nodes that jobs may ask for (`node_group`).",
    context_settings={"help_option_names": ["-h", "--help"]},
)

token_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make, list and revoke tokens of the HTTP interface.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run torchrun, mpirun, horovodrun, TensorFlow and Ray training scripts over the nodes of a Ray cluster, unchanged.

    Modes: ddp (PyTorch), mpi, horovod, ps (TensorFlow, parameter servers), ray (a Ray cluster of the job's own).

    \b
    Try it:
      raycontrol run --nodes 2 -- torchrun train.py
      raycontrol submit job.yaml
      raycontrol logs -f digits-ab12cd

    An id may be shortened as long as it is unique. What prints facts takes --json.
    """
    if version:
        offline.version(context)
    elif context.invoked_subcommand is None:
        context.obj.out.line(context.get_help())


app.command(cls=WithCommand, short_help="Submit a job, follow it, exit with its status.")(run.run)
app.command(cls=WithCommand, short_help="Submit a job and print its id.")(run.submit)
app.command("list", short_help="List jobs: unfinished ones and the last 20.")(jobs.list_jobs)
app.command(short_help="Show everything about one job.")(jobs.get)
app.command(short_help="Print what a job's programs wrote.")(jobs.logs)
app.command(short_help="Print every change of a job.")(jobs.events)
app.add_typer(outputs_app, name="outputs", short_help="Fetch what a job has left.")
outputs_app.command(short_help="Fetch a job's outputs to this machine.")(outputs.get)
app.command(short_help="Open a shell in a running instance.")(shell.shell)
app.command(short_help="Show what running jobs use, live.")(top.top)
app.command(short_help="Wait for a job's end, exit with its status.")(jobs.wait)
app.command(short_help="Ask jobs to stop.")(jobs.stop)
app.command("exec", cls=WithCommand, short_help="Run a command on nodes, or inside a job.")(execute.execute)
app.command(short_help="Show who waits for nodes, and for what.")(queueing.queue)
app.command(short_help="Give a waiting job another priority.")(queueing.priority)
app.command(short_help="Keep waiting jobs from being started.")(queueing.hold)
app.command(short_help="Let held jobs go.")(queueing.release)
app.command(short_help="Stop jobs, and keep them in the queue.")(queueing.suspend)
app.command(short_help="Let suspended jobs go on.")(queueing.resume)
app.command(cls=WithCommand, short_help="Print what a job would do; starts nothing.")(offline.plan)
app.command(short_help="Print a job's variables for this shell.")(offline.env)
app.command("ray-env", short_help="Print settings for `ray start`.")(offline.ray_env)
app.command(short_help="Print the JSON Schema of a spec.")(offline.schema)
app.command("nodes", short_help="List the cluster's nodes and who uses them.")(nodes.list_nodes)
app.add_typer(node_app, name="node", short_help="Look at one node, drain or group nodes.")
node_app.command(short_help="Show everything about it.")(nodes.show)
node_app.command(short_help="Let nodes take no new job.")(draining.offline)
node_app.command(short_help="Let nodes take jobs again.")(draining.online)
node_app.add_typer(group_app, name="group", short_help="Group nodes, for jobs to ask for.")
group_app.command("list", short_help="List the groups.")(draining.list_groups)
group_app.command(short_help="Put nodes into one.")(draining.add)
group_app.command(short_help="Take nodes out of one, or remove it.")(draining.remove)
app.command(short_help="Check the nodes: ok, or what to do.")(nodes.doctor)
app.command(short_help="Remove old ended jobs, their logs and outputs.")(jobs.prune)
app.add_typer(controller_app, name="controller", short_help="Show or replace the cluster's controller.")
controller_app.command(short_help="Show where it runs, its version, home and jobs.")(controller.status)
controller_app.command(short_help="Replace it, or start one; jobs run on.")(controller.restart)
app.command(short_help="Serve the cluster over HTTP, on its head.")(serve.serve)
app.add_typer(token_app, name="token", short_help="Make, list and revoke tokens of the HTTP interface.")
token_app.command(short_help="Make one and print it, this once.")(token.create)
token_app.command("list", short_help="List them, expired and revoked ones too.")(token.list_tokens)
token_app.command(short_help="End one, for good.")(token.revoke)
app.command(short_help="Print the version.")(offline.version)
