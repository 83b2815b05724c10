"""Ray: a cluster of the job's own inside its reservation, which a plain ``ray.init()`` in the start command finds.

Every instance runs one Ray node, which says that it has what the instance has reserved; the start command runs on the
head when all nodes have joined. The options are those of ``ray start``
(https://docs.ray.io/en/latest/cluster/cli.html); the environment variables Ray's own.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from raycontrol.backends import ssh
from raycontrol.backends.contract import bracketed, environments, merged, start, start_command, warnings
from raycontrol.plan import ASKED, Brief, Cause, Facts, Plan, PlannedRun, RayNodesJoined, SharedSecret, Stage
from raycontrol.spec import JobSpec, Member, members

NODE = "ray-node"
"""The run that is an instance's Ray node."""
GCS, CLIENT, MONITOR, DASHBOARD = "ray", "ray-client", "ray-monitor", "ray-dashboard"
"""Purposes of the head's ports."""
TOKEN = "ray/token"
STOP_TRIES = 100
"""Tenths of a second that `ray stop` gives the node."""
JOIN_LIMIT_S = 90.0
JOIN_INSTANCE_S = 1.0
"""How much longer joining may take for each instance: many may share a machine."""
OUT_OF_MEMORY = ("ray.exceptions.OutOfMemoryError", "killed due to the node running low on memory")


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """A Ray node on every instance; when the head lists all of them, the start command on the head."""
    gang = members(spec)
    head, *workers = (member.name for member in gang)
    own = {fact.instance: _variables(number, fact, facts[0]) for number, fact in enumerate(facts)}
    join = Stage(
        name="start Ray",
        says=f"the job's Ray cluster has {len(gang)} node{'s' if workers else ''}",
        limit_s=JOIN_LIMIT_S + JOIN_INSTANCE_S * len(gang),
        runs={
            member.name: (_node(spec, member, fact, facts[0]),)
            for member, fact in zip(gang, facts, strict=True)
        },
        until=(RayNodesJoined(head, tuple(member.name for member in gang)),),
    )
    return Plan(
        mode=spec.mode,
        environment=environments(spec, brief, facts, own),
        files=merged(
            ssh.files(gang, facts) if spec.ssh else {},
            {fact.instance: {"bin/ray": _stand_in(brief, fact)} for fact in facts},
        ),
        stages=(
            *(ssh.stages(gang) if spec.ssh else ()),
            join,
            start({head: start_command(spec, gang[0])}),
        ),
        deciders=frozenset([head]),
        warnings=tuple(warnings(spec, gang[:1])),
        servers=frozenset(workers),
        dispensable=frozenset(workers if spec.ray.tolerate_worker_loss else ()),
        secret=SharedSecret(head, TOKEN),
    )


def leases(member: Member) -> tuple[str, ...]:
    """The head's ports that Ray does not find itself; and ``MASTER_PORT``, as in every mode."""
    return ("master", GCS, CLIENT, MONITOR, DASHBOARD) if member.index == 0 else ()


def explain(lines: Sequence[str]) -> Cause | None:
    """Ray names no rank; that its memory monitor has killed a task is worth advice."""
    text = "\n".join(lines)
    if not any(words in text for words in OUT_OF_MEMORY):
        return None
    return Cause(
        advice="Ray killed a task because the machine's memory ran low: let tasks use less, run fewer at once "
        "(`num_cpus`, `memory` of the task), or reserve more"
    )


def _variables(rank: int, fact: Facts, head: Facts) -> dict[str, str]:
    metrics = {"AUTOSCALER_METRIC_PORT": MONITOR, "DASHBOARD_METRIC_PORT": DASHBOARD}
    return {
        **{name: head.ports[purpose] for name, purpose in metrics.items() if fact is head},
        "RANK": str(rank),
        "HEAD_ADDR": head.ip,
        "HEAD_PORT": head.ports[GCS],
        "RAY_ADDRESS": _address(head),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{fact.private_dir}/{TOKEN}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": fact.temp_dir,
        # Ray's agents take titles of their own; without this they would write them over their environment, by which
        # processes of a job are known.
        "SPT_NOENV": "1",
        # In bash the stand-in comes first although an environment has been activated.
        "BASH_FUNC_ray%%": f'() {{ {shlex.quote(f"{fact.private_dir}/bin/ray")} "$@"\n}}',
    }


def _address(head: Facts) -> str:
    return f"{bracketed(head.ip)}:{head.ports[GCS]}"


def _session_parent(fact: Facts) -> str:
    """Return where Ray keeps its sessions: where it looks by itself, too, when RAY_TMPDIR is set.

    It lets everybody write there, which the folder above prevents.
    """
    return f"{fact.temp_dir}/ray"


def _node(spec: JobSpec, member: Member, fact: Facts, head: Facts) -> PlannedRun:
    """Return the run of one Ray node. A port 0 is one that Ray finds free itself; others would be the same on a whole machine."""
    if member.index == 0:
        place = [
            "--head",
            f"--port={head.ports[GCS]}",
            f"--ray-client-server-port={head.ports[CLIENT]}",
            f"--temp-dir={_session_parent(fact)}",
            f"--include-dashboard={'true' if spec.ray.dashboard else 'false'}",
            f"--dashboard-host={head.ip}",
            "--dashboard-port=0",
        ]
    else:
        place = [f"--address={_address(head)}", f"--temp-dir={_session_parent(fact)}"]
    options = [
        *place,
        f"--node-ip-address={fact.ip}",
        f"--node-name={member.name}",
        f"--num-cpus={int(member.resources.cpu)}",
        f"--num-gpus={len(fact.gpus)}",
        f"--memory={fact.memory}",
        f"--object-store-memory={fact.object_store}",
        f"--resources={json.dumps({f'Rank:{member.index}': 1})}",
        f"--labels=group={member.group}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--disable-usage-stats",
        "--block",
    ]
    return PlannedRun(NODE, ("ray", "start", *options), cwd=spec.cwd, service=True)


def _stand_in(brief: Brief, fact: Facts) -> str:
    """Return the program that stands before ``ray``: `ray stop` would end every Ray on this machine, the outer one too."""
    return f"""#!/bin/sh
# ray of this job. `ray stop` ends the job's own Ray node on this instance; everything else is ray's own.
node={shlex.quote(f"{fact.private_dir}/{NODE}")}
command=
value=
for word; do
  if [ -n "$value" ]; then value=; continue; fi
  case $word in
    --logging-level | --logging-format | --log-style | --log-color) value=next;;
    -*) ;;
    *) command=$word; break;;
  esac
done
case " $* " in *" --help "*) command=help;; esac
if [ "$command" = stop ]; then
  pid=
  [ -e "$node/pid" ] && read -r pid <"$node/pid"
  if tr '\\0' '\\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF {shlex.quote("RAYCONTROL_ATTEMPT_ID=" + brief.attempt_id)}; then
    : >"$node/{ASKED}"
    kill -TERM "$pid"
    tries=0
    while kill -0 "$pid" 2>/dev/null; do
      tries=$((tries + 1))
      [ "$tries" -lt {STOP_TRIES} ] || kill -KILL "$pid" 2>/dev/null
      sleep 0.1
    done
    echo "raycontrol: the Ray node of this instance has ended; no other Ray on this machine was touched"
  else
    echo "raycontrol: the Ray node of this instance has ended already"
  fi
  exit 0
fi
[ -e "$node/pid" ] || echo $$ >"$node/pid"  # the first to call is the node's own run
IFS=:
set -f
for folder in $PATH; do
  folder=${{folder:-.}}
  if [ -f "$folder/ray" ] && [ -x "$folder/ray" ] && [ ! -e "$folder/../{TOKEN}" ]; then
    unset IFS
    exec "$folder/ray" "$@"
  fi
done
echo "raycontrol: there is no ray on the PATH of this instance: install it there, or name its folder in env PATH" >&2
exit 127
"""
