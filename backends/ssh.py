"""Job-private ssh: what each instance needs so that ``ssh``, ``scp`` and ``rsync`` reach the job's others, and only those.

No secret is in here. Each instance makes its own two keys; the plan tells everybody the public ones, so that a host is
known by its key before the first connection, and only the job's instances may log in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from raycontrol.plan import Facts, ServesSsh, SshAnswers, Stage
from raycontrol.spec import Member

SERVE_LIMIT_S = 30.0
PROVE_LIMIT_S = 60.0
PROVE_INSTANCE_S = 0.2
"""How much longer the proofs may take for each instance: the first one makes and takes all of them."""
FLAGS = {"ssh": "46AaCfGgKkMNnqsTtVvXxYy", "scp": "12346ABCdfOpqRrsTtv", "sftp": "1246AaCfhNpqrv"}
"""Programs that have a stand-in, and their options that take no value."""


def files(gang: Sequence[Member], facts: Sequence[Facts]) -> dict[str, dict[str, str]]:
    """Return what each instance has for ssh, by path below its private folder."""
    names = names_of(gang, facts)
    keys = "".join(f"{fact.login_key}\n" for fact in facts)
    known = "".join(f"{fact.instance} {fact.host_key}\n" for fact in facts)
    ports = "".join(f" {name}={fact.ports['ssh']}" for fact in facts for name in names[fact.instance])
    shared = {
        "ssh/authorized_keys": keys,
        "ssh/known_hosts": known,
        "ssh/config": _config(names, facts),
        "ssh/hosts.json": json.dumps(_table(names, facts), indent=1),
        "ssh/ports": f"{ports} \n",
    }
    return {
        fact.instance: {
            **shared,  # the same text for all: in a large gang it is long
            **{f"bin/{program}": _script(program, fact) for program in FLAGS},
        }
        for fact in facts
    }


def stages(gang: Sequence[Member]) -> tuple[Stage, ...]:
    """Every endpoint opens; then INDEX 0 reaches all others through ssh, and they reach it."""
    first, *others = (member.name for member in gang)
    serve = Stage(
        name="serve ssh",
        says="every instance serves ssh",
        limit_s=SERVE_LIMIT_S,
        until=tuple(ServesSsh(member.name) for member in gang),
    )
    if not others:
        return (serve,)
    there = tuple(SshAnswers(first, name) for name in others)
    back = tuple(SshAnswers(name, first) for name in others)
    prove = Stage(
        name="prove ssh",
        says=f"{first} and the others reach each other through ssh",
        limit_s=PROVE_LIMIT_S + PROVE_INSTANCE_S * len(others),
        until=there + back,
    )
    return (serve, prove)


def names_of(gang: Sequence[Member], facts: Sequence[Facts]) -> Mapping[str, tuple[str, ...]]:
    """Return the names by which each instance is reached: its own and, the first on its node, the node's name and address."""
    taken: set[str] = {member.name for member in gang}
    names: dict[str, tuple[str, ...]] = {}
    for fact in facts:
        of_node = tuple(name for name in dict.fromkeys((fact.node_name, fact.ip)) if name not in taken)
        taken.update(of_node)
        names[fact.instance] = (fact.instance, *of_node)
    return names


def _table(names: Mapping[str, tuple[str, ...]], facts: Sequence[Facts]) -> dict[str, dict[str, str]]:
    return {
        name: {"ip": fact.ip, "port": fact.ports["ssh"], "alias": fact.instance, "host_key": fact.host_key}
        for fact in facts
        for name in names[fact.instance]
    }


def _config(names: Mapping[str, tuple[str, ...]], facts: Sequence[Facts]) -> str:
    """Return an OpenSSH client configuration (ssh_config(5)); of an option that is given twice the first counts.

    What differs between instances, the places of keys, is given by ``_script``.
    """
    hosts = "\n".join(
        f"Host {' '.join(names[fact.instance])}\n"
        f"  HostName {fact.ip}\n"
        f"  Port {fact.ports['ssh']}\n"
        f"  HostKeyAlias {fact.instance}\n"
        for fact in facts
    )
    return f"""# The instances of this job, each known by its host key.
{hosts}
Host *
  IdentitiesOnly yes
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  UpdateHostKeys no
  CheckHostIP no
  PreferredAuthentications publickey
  BatchMode yes
  ForwardAgent no
  ForwardX11 no
  ControlMaster no
  ControlPath none
  Compression no
  Ciphers aes128-gcm@openssh.com,aes256-gcm@openssh.com
  ConnectTimeout 30
  ServerAliveInterval 10
  ServerAliveCountMax 3
  LogLevel ERROR
"""


def _quoted(folder: str, path: str) -> str:
    """Return a path as ssh_config(5) reads it: in quotes, with ``%`` doubled."""
    text = f"{folder}/{path}".replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text.replace("%", "%%")}"'


_REMOTE = """\
  case $word in
    \\[*\\] | *@\\[*\\] | \\[*\\]:* | *@\\[*\\]:*) host=${word#*\\[}; host=${host%%\\]*};;
    *) host=${word%%:*}; host=${host##*@};;
  esac"""
_HOST_OF = {
    "ssh": "  host=${word##*@}",
    "scp": f"  case $word in *:*) ;; *) continue;; esac\n{_REMOTE}",
    "sftp": _REMOTE,
}
"""How the host is found in a word that is no option. (What has no colon is scp's own file.)"""


def _script(program: str, own: Facts) -> str:
    """Return the program that stands before the node's own: options that it gives first win over any later ones.

    It gives the port too, because a start command may say ``-p 22``.
    """
    fallback = (
        f'exec {shlex.quote(own.python)} -I -m raycontrol.sshclient "$private" "$@"'
        if program == "ssh"
        else f'echo "raycontrol: {program} is not installed on this node; only ssh works without it" >&2\n  exit 127'
    )
    ends = "" if program == "scp" else "  break\n"  # scp may name several hosts
    return f"""#!/bin/sh
# {program} to the instances of this job, by the job's own keys; to any other host it is the node's own {program}.
private={shlex.quote(own.private_dir)}
IFS= read -r ports <"$private/ssh/ports"
port=
value=
for word; do
  if [ -n "$value" ]; then value=; continue; fi
  case $word in
    --) continue;;
    -?*)
      rest=${{word#-}}
      rest=${{rest#"${{rest%%[!{FLAGS[program]}]*}}"}}
      [ ${{#rest}} -ne 1 ] || value=next
      continue;;
  esac
{_HOST_OF[program]}
  case $ports in
    *" $host="*)
      found=${{ports#*" $host="}}
      found=${{found%% *}}
      [ "${{port:-$found}}" = "$found" ] && port=$found || port=several;;
  esac
{ends}done
real=
IFS=:
set -f
for folder in $PATH; do
  folder=${{folder:-.}}
  if [ -f "$folder/{program}" ] && [ -x "$folder/{program}" ] && [ ! -e "$folder/../ssh/hosts.json" ]; then
    real=$folder/{program}
    break
  fi
done
unset IFS
if [ -z "$real" ]; then
  {fallback}
elif [ -z "$port" ]; then
  exec "$real" "$@"
fi
[ -z "$RAYCONTROL_SEND" ] || set -- -o SendEnv="$RAYCONTROL_SEND" "$@"
[ -z "$RAYCONTROL_INSIDE" ] || set -- -o SendEnv=RAYCONTROL_INSIDE "$@"
[ "$port" = several ] || set -- -o Port="$port" "$@"
exec "$real" -F "$private/ssh/config" -o StrictHostKeyChecking=yes \\
  -o {shlex.quote("IdentityFile=" + _quoted(own.private_dir, "ssh/login_key"))} \\
  -o {shlex.quote("UserKnownHostsFile=" + _quoted(own.private_dir, "ssh/known_hosts"))} "$@"
"""
