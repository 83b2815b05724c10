"""The layers of ``docs/architecture.md``: a module imports its own layer or a lower one, never a higher one.

Imports are read from the source, wherever they stand (in functions and under ``TYPE_CHECKING`` too).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raycontrol"

# Lowest first. A module that is not here fails the test: give it a place.
LAYERS = {
    "words": "arrayspec access conditions cursors errors execution hardware nodesets presets raysettings spec specfaults specfile specnodes specmounts specparts specrules status version wording",
    "thought": "arrayqueue arrays attempts backends choosing demands dependencies doctor events gate job keeping lifecycle parts placement plan promises queue queuejobs rdma relations retention retries room stopping transports verdicts wishes",
    "machine": (
        "accessrows beneath database disk extras fence flocks ignore jobrows leases logs lookups memberrows metricrows mounts nodeenv nodefacts noderows nvidia nvml outputs packages packing process rdmaports settings sharedprobe shipping steadyclock "
        "ports raynodes raystart samples sshclient sshd sshpipes sshsession shellenv standin store supervisor sysfiles tokens trees usage"
    ),
    "roles": "archive background caretaker targets controller duties equipment execs gatekeeper heldstore instance ledger links node porter preparing proofs reporter roster runs scheduler sharing survey terminals",
    "ray": "actors cluster connect rayauth spareworkers",
    "user": "arraylogs client httpcalls logview outcomes readers remote remoteexec spread shells storereader",
    "faces": "__main__ api cli",
}
LEVEL = {module: level for level, modules in enumerate(LAYERS.values()) for module in modules.split()}

# Libraries, and the only modules that may import them.
LIBRARIES = {
    "asyncssh": {"sshclient", "sshd", "sshsession"},
    "fastapi": {"api"},
    "grpc": {"rayauth"},
    "h11": {"api"},
    "mounts": {"supervisor"},  # the file beside it, by its path
    "httpx": {"httpcalls", "remote", "remoteexec"},
    "pathspec": {"ignore", "packing"},
    "prometheus_client": {"api"},
    "psutil": {"nodefacts"},
    "pydantic": {
        "access",
        "hardware",
        "httpcalls",
        "jobrows",
        "remote",
        "spec",
        "specfaults",
        "specfile",
        "specmounts",
        "specnodes",
        "specparts",
        "specrules",
        "status",
        "api",
    },
    "pydantic_core": {"specmounts", "specnodes", "specparts"},
    "pynvml": {"nvml"},
    "ray": {"actors", "cluster", "connect", "rayauth", "raynodes", "spareworkers"},
    "rich": {"cli"},
    "ruamel": {"presets", "settings", "specfile"},
    "sqlalchemy": {"accessrows", "database", "leases", "memberrows", "metricrows", "noderows", "store"},
    "starlette": {"api"},
    "typer": {"cli"},
    "uvicorn": {"api"},
}


def sources() -> list[tuple[str, Path]]:
    """Every module of the package, by the first part of its name below ``raycontrol``, and its file."""
    files = [
        file
        for folder in (PACKAGE, PACKAGE / "backends", PACKAGE / "api", PACKAGE / "cli")
        for file in folder.glob("*.py")
    ]
    return [
        (file.stem if file.parent == PACKAGE else file.parent.name, file)
        for file in sorted(files)
        if file != PACKAGE / "__init__.py"
    ]


SOURCES = sources()


@cache
def parsed(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> Iterator[str]:
    """The full names that a file imports; ``from raycontrol import queue`` imports ``raycontrol.queue``."""
    for node in parsed(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("""
import os.path
from raycontrol import queue
if TYPE_CHECKING:
    from raycontrol.spec import JobSpec as Spec
def work():
    import ray
    importlib.import_module("raycontrol.backends.ddp_mode")
""")
    assert sorted(imports(file)) == [
        "os.path",
        "ray",
        "raycontrol.backends.ddp_mode",
        "raycontrol.queue",
        "raycontrol.spec.JobSpec",
    ]


def test_every_module_has_a_layer() -> None:
    assert {module for module, _ in SOURCES} == set(LEVEL)


@pytest.mark.parametrize(("module", "file"), SOURCES, ids=[f"{m}:{f.stem}" for m, f in SOURCES])
def test_a_module_imports_its_own_layer_or_a_lower_one(module: str, file: Path) -> None:
    for name in imports(file):
        top, *rest = name.split(".")
        if top == "raycontrol" and rest and rest[0] in LEVEL:
            assert LEVEL[rest[0]] <= LEVEL[module], f"{module} imports {name}, which is above it"
        elif top != "raycontrol" and top not in sys.stdlib_module_names:
            assert module in LIBRARIES.get(top, ()), f"{module} must not import {name}"


def test_thought_is_pure() -> None:
    """No clock, no files, no processes, no network, no tasks."""
    banned = {
        "asyncio",
        "datetime",
        "io",
        "logging",
        "os",
        "pathlib",
        "random",
        "secrets",
        "shutil",
        "socket",
        "subprocess",
    }
    banned |= {"sys", "tempfile", "threading", "time", "uuid"}
    found = {
        (file.name, name)
        for module, file in SOURCES
        if module in LAYERS["thought"].split()
        for name in imports(file)
        if name.split(".")[0] in banned
    }
    assert found == set()


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    reading = {"environ", "getenv", "environb"}
    found = {
        module
        for module, file in SOURCES
        for node in parsed(file)
        if isinstance(node, ast.Attribute) and node.attr in reading and ast.unparse(node.value) == "os"
    }
    # rayauth looks for Ray's own mode. The supervisor and connect have Ray's worker environment to clear, process has the interpreter's own libraries to
    # find, cli asks the terminal for its colours: none of that is a setting.
    assert found <= {"settings", "supervisor", "connect", "process", "cli", "standin", "rayauth"}


def test_our_own_folders_are_never_imported_by_their_bare_names() -> None:
    found = {
        (file.name, name)
        for _, file in SOURCES
        for name in imports(file)
        if name.split(".")[0] in ("api", "backends")
    }
    assert found == set()
