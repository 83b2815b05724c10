"""Writes down what a job's processes find around them. Nothing but the standard library; knows only the contract.

Each instance starts ``RAYCONTROL_SLOTS`` processes. The first of INDEX 0 listens on MASTER_PORT; all others
connect to it, it tells everybody where the others listen, everybody connects to everybody, and nobody ends before
all have done so: all processes of the job live at the same time. Each prints one line, ``PROBE `` and a JSON
document, and writes the document to ``$RAYCONTROL_OUTPUT_DIR/probe-<INDEX>-<process>.json``. Where TF_CONFIG has an
address for the instance, its first process listens there as long as it lives.

Mode ray, where a start command runs on INDEX 0 only, has ``probe_ray.py``.

``--hold PATH``: once all have met, each waits until PATH exists (on its own host), so that two jobs can be held
side by side; ``PATH.<job id>.<INDEX>-<process>`` says that it waits. ``--time S`` (60) limits every wait.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

Document = dict[str, Any]

SIOCGIFADDR = 0x8915
HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE")


def main() -> None:
    options = arguments()
    slots = int(os.environ["RAYCONTROL_SLOTS"])
    inherited = descriptors()
    children = [fork(partial(process, local, inherited, options)) for local in range(1, slots)]
    process(0, inherited, options)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes), default=0))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold")
    parser.add_argument("--time", type=float, default=60)
    return parser.parse_args()


def fork(body: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        body()
    except BaseException as error:
        print(f"probe: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def process(local: int, inherited: list[str], options: argparse.Namespace) -> None:
    document = surroundings(local, inherited)
    with ExitStack() as stack:
        if local == 0 and "TF_CONFIG" in os.environ:
            document["listened"] = listen(stack)
        meet_and_wait(document, options)
    write_down(document)


def meet_and_wait(document: Document, options: argparse.Namespace) -> None:
    deadline = time.time() + options.time
    meet(document, deadline)
    if options.hold:
        Path(f"{options.hold}.{os.environ['RAYCONTROL_JOB_ID']}.{name_of(document)}").touch()
        while not Path(options.hold).exists() and time.time() < deadline:
            time.sleep(0.05)
    document["ended"] = time.time()


def write_down(document: Document) -> None:
    text = json.dumps(document, sort_keys=True)
    (Path(os.environ["RAYCONTROL_OUTPUT_DIR"]) / f"probe-{name_of(document)}.json").write_text(text)
    os.write(1, f"PROBE {text}\n".encode())


def name_of(document: Document) -> str:
    return f"{document['index']}-{document['local']}"


# -- what is around


def surroundings(local: int, inherited: list[str], by: str = "command") -> Document:
    """What this process finds; ``by`` says who started it, the job's start command or a ``task`` of its own Ray."""
    return {
        "by": by,
        "index": int(os.environ["INDEX"]),
        "local": local,
        "started": time.time(),
        "env": dict(os.environ),
        "argv": sys.argv,
        "executable": sys.executable,
        "hostname": socket.gethostname(),
        "addresses": addresses(),
        "cwd": str(Path.cwd()),
        "files": files(),
        "writable": os.access(".", os.W_OK),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "descriptors": inherited,
        "nice": os.nice(0),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "blocked_signals": blocked_signals(),
        "umask": umask(),
        "hostfiles": {name: hostfile(name) for name in HOSTFILES if name in os.environ},
        "token_mode": token_mode(),
    }


def hostfile(name: str) -> list[str]:
    return Path(os.environ[name]).read_text().splitlines()


def token_mode() -> int | None:
    """The permissions of the file that holds the token of the job's own Ray, which itself is nobody's business."""
    try:
        return stat.S_IMODE(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).stat().st_mode)
    except (KeyError, OSError):
        return None


def listen(stack: ExitStack) -> bool | None:
    """Listen on the port that TF_CONFIG has for this task, until the stack is unwound; None where it has none."""
    config = json.loads(os.environ["TF_CONFIG"])
    tasks = config["cluster"].get(config["task"]["type"])
    if tasks is None:
        return None
    port = int(tasks[config["task"]["index"]].rpartition(":")[2])
    try:
        stack.enter_context(socket.create_server(("", port)))
    except OSError as error:
        print(f"probe: port {port}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def addresses() -> list[str]:
    """The IPv4 address of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, request)
            except OSError:
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


def files() -> list[str]:
    here = Path()
    return sorted(str(path) for path in here.rglob("*") if path.is_file())[:1000]


def descriptors() -> list[str]:
    """What this process has open beyond stdin, stdout and stderr."""
    opened = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if int(entry.name) > 2:
                opened.append(str(entry.readlink()))
        except OSError:
            continue  # the listing's own
    return opened


def blocked_signals() -> list[int]:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            mask = int(line.split()[1], 16)
            return [number for number in range(1, 65) if mask >> (number - 1) & 1]
    return []


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


# -- the others


def meet(document: Document, deadline: float) -> None:
    """Fill in ``bound`` (on the first process of INDEX 0), ``seen`` (who was there) and ``reached`` (whom we could connect to)."""
    here = os.environ["NODE_LIST"].split(",")[int(os.environ["INDEX"])].rsplit(":", 1)[0]
    with socket.create_server(("", 0), backlog=256) as mine:
        card = {"name": name_of(document), "address": [here, mine.getsockname()[1]]}
        if document["index"] == 0 and document["local"] == 0:
            lead(document, card, deadline)
        else:
            follow(document, card, deadline)


def lead(document: Document, card: Document, deadline: float) -> None:
    total = int(os.environ["RAYCONTROL_NP"])
    with socket.create_server(("", int(os.environ["MASTER_PORT"])), backlog=256) as server:
        document["bound"] = True
        cards, streams = [card], []
        while len(cards) < total:
            server.settimeout(max(0.1, deadline - time.time()))
            connection, _ = server.accept()
            connection.settimeout(max(0.1, deadline - time.time()))
            stream = connection.makefile("rw")
            line = stream.readline()
            if line.startswith("{"):  # else somebody only tried whether we listen
                cards.append(json.loads(line))
                streams.append(stream)
        for stream in streams:
            say(stream, cards)
        reach(document, cards, deadline)
        for stream in streams:
            stream.readline()
        for stream in streams:
            say(stream, "all done")


def follow(document: Document, card: Document, deadline: float) -> None:
    document["bound"] = False
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with connected(address, deadline).makefile("rw") as stream:
        say(stream, card)
        reach(document, json.loads(stream.readline()), deadline)
        say(stream, "done")
        stream.readline()


def reach(document: Document, cards: list[Document], deadline: float) -> None:
    document["seen"] = sorted(str(card["name"]) for card in cards)
    document["reached"] = []
    for card in cards:
        host, port = card["address"]
        connected((host, port), deadline).close()
        document["reached"].append(card["name"])


def connected(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, timeout=2)
        except OSError:
            if time.time() > deadline:
                raise
            time.sleep(0.05)
        else:
            connection.settimeout(max(0.1, deadline - time.time()))
            return connection


def say(stream: TextIO, value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
