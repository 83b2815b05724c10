"""Specs in files: YAML 1.2, places of faults, overrides; the example configs and the schema."""

from __future__ import annotations

import json
import time
from io import BytesIO, TextIOWrapper
from pathlib import Path

import jsonschema
import pytest

from raycontrol.errors import Fault, SpecError
from raycontrol.spec import JobSpec, Resources, load, schema
from raycontrol.specfile import override, parse

ROOT = Path(__file__).parents[2]


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_text(text, overrides=overrides)
    return [str(fault) for fault in caught.value.faults]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# -- YAML ------------------------------------------------------------------------------------------------------------


def test_yaml_is_read_by_the_rules_of_1_2() -> None:
    text = (
        """
on: on
yes: yes
octal: 0123
zero: 08
under: 1_000
time: 1:30
date: 2001-01-01
equals: =
version: 1.2.3
tagged: !!str 5
quoted: "5"
long: %s
hex: 0x1F
new_octal: 0o17
signed: -12
exponent: 1e-3
half: .5
true: x
""".replace("true: x", '"true": TRUE\nnothing: ~\nempty:')
        % ("1" * 5000)
    )
    data = parse(text).data
    assert data.pop("long") == "1" * 5000
    assert data == {
        "on": "on",
        "yes": "yes",
        "octal": "0123",
        "zero": "08",
        "under": "1_000",
        "time": "1:30",
        "date": "2001-01-01",
        "equals": "=",
        "version": "1.2.3",
        "tagged": "5",
        "quoted": "5",
        "hex": 31,
        "new_octal": 15,
        "signed": -12,
        "exponent": 0.001,
        "half": 0.5,
        "true": True,
        "nothing": None,
        "empty": None,
    }


def test_a_directive_for_1_1_does_not_bring_its_rules_back() -> None:
    assert parse("%YAML 1.1\n---\na: on\nb: 0123\n").data == {"a": "on", "b": "0123"}


def test_json_is_read_too() -> None:
    spec = JobSpec.from_text('{\n\t"command": ["python", "\\ud83d\\ude00"],\n\t"nodes": 2}')
    assert spec == JobSpec(command=("python", "\N{GRINNING FACE}"), nodes=2)


def test_aliases_work() -> None:
    spec = JobSpec.from_text("command: x\nenv: &e {A: b}\ngroups: {worker: {env: *e}}\n")
    assert spec.groups["worker"].env == {"A": "b"}


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    began = time.monotonic()
    assert faults("\n".join(levels)) == [
        "line 1, column 1: the text holds more than 20000 values (aliases included)"
    ]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1, column 1: there is nothing in it; a job needs at least `command: …`"),
        ("# only a comment\n", "line 1, column 1: there is nothing in it; a job needs at least `command: …`"),
        ("- a\n", "line 1, column 1: a job's spec must be a mapping of fields, such as `command: torchrun train.py`, got a list of 1"),
        ("torchrun\n", "line 1, column 1: a job's spec must be a mapping of fields, such as `command: torchrun train.py`, got torchrun"),
        ("command: {x\n", "line 2, column 1: this is not YAML: while parsing a flow mapping expected ',' or '}', but got '<stream end>'"),
        ("command: x\n---\ncommand: y\n", "line 2, column 1: this is not YAML: expected a single document in the stream but found another document"),
        ("command: *nowhere\n", "line 1, column 10: this is not YAML: found undefined alias 'nowhere'"),
        ("command: x\x00y\n", "line 1, column 11: this is not YAML: character U+0000 is not allowed in YAML"),
        ("[" * 100, "line 1, column 1: the text is nested too deeply"),
        ('command: "a\\0b"\n', 'line 1, column 10: command: must not contain a NUL byte, got "a\\x00b"'),
        ("command: x\ncommand: y\n", "line 2, column 1: command: must be given once, and is already on line 1"),
        ("command: !shell x\n", "line 1, column 10: command: must not have a tag (!shell)"),
        ("command: !!python/object:os.system x\n", "line 1, column 10: command: must not have a tag (!python/object:os.system)"),
        ("command: x\nenv: {1: a}\n", 'line 2, column 7: env: names must be text, write "1" in quotes, got 1'),
        ("command: x\nenv: {<<: {A: b}}\n", "line 2, column 7: env: `<<` is not part of YAML 1.2; write the fields out"),
        ("command: x\nenv: {? [a] : b}\n", "line 2, column 9: env: names must be text"),
        ("command: x\nenv: &e {A: *e}\n", "line 2, column 6: env.A: an alias must not contain itself"),
        ("command: x\nnodes: 0123\n", 'line 2, column 8: nodes: must be a whole number, or a range such as "2-4", got 0123'),
        ("command: x\npipefail: on\n", "line 2, column 11: pipefail: must be true or false, got on"),
        ("command: x\nenv:\n  LR: 1e-3\n", 'line 3, column 7: env.LR: must be text, write LR: "1e-3", got 1e-3'),
        ("command: x\nenv:\n  ON: True\n", 'line 3, column 7: env.ON: must be text, write ON: "True", got True'),
        ("command: x\nresources:\n  gpus: 2\n", "line 3, column 3: resources.gpus: unknown field, did you mean gpu?"),
        ("nodes: 2\n", "line 1, column 1: command: must be given: the line that starts the program, such as `command: torchrun train.py`"),
    ],
)  # fmt: skip
def test_a_faulty_text(text: str, expected: str) -> None:
    assert faults(text) == [expected]


FORTY = """\
nmae: digits
name: my digits
mode: pdd
command: [torchrun, 4, null, "a\\0b"]
command: torchrun
node: 3
nodes: 0123
resources:
  cpu: 0
  gpu: 1.5
  memory: 8
  gpus: 2
slots: 0
share_gpus: yes
gpu: 2
priority: 10
placement: spread
pipefail: 1
labels: {team: 1, "b c": x}
timeouts: {queue_s: 0, run: 3, grace_s: -1}
cwd: ""
env:
  EPOCHS: 3
  DEBUG: true
  API_TOKEN: 12345
  RANK: "0"
  RAYCONTROL_SLOTS: "1"
  1: x
  LIST: [a]
  "A=B": x
groups:
  Master: {count: 0}
  worker: {count: -1, resources: {cpus: 2}, slots: 1.0}
  a: 5
  b: {env: {HOST_KEY: 5}}
"""


def test_forty_faults_are_one_answer() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_text(FORTY, "job.yaml")

    assert [(fault.line, fault.field) for fault in caught.value.faults] == [
        (1, "nmae"),
        (2, "name"),
        (3, "mode"),
        (4, "command[1]"),
        (4, "command[2]"),
        (4, "command[3]"),
        (5, "command"),
        (6, "node"),
        (7, "nodes"),
        (7, "nodes"),
        (9, "resources.cpu"),
        (10, "resources.gpu"),
        (11, "resources.memory"),
        (12, "resources.gpus"),
        (13, "slots"),
        (14, "share_gpus"),
        (15, "gpu"),
        (16, "priority"),
        (17, "placement"),
        (18, "pipefail"),
        (19, "labels.team"),
        (19, "labels.b c"),
        (20, "timeouts.queue_s"),
        (20, "timeouts.run"),
        (20, "timeouts.grace_s"),
        (21, "cwd"),
        (23, "env.EPOCHS"),
        (24, "env.DEBUG"),
        (25, "env.API_TOKEN"),
        (26, "env.RANK"),
        (27, "env.RAYCONTROL_SLOTS"),
        (28, "env"),
        (29, "env.LIST"),
        (30, "env.A=B"),
        (32, "groups.Master"),
        (32, "groups.Master.count"),
        (33, "groups.worker.count"),
        (33, "groups.worker.resources.cpus"),
        (33, "groups.worker.slots"),
        (34, "groups.a"),
        (35, "groups.b.env.HOST_KEY"),
    ]
    assert str(caught.value).startswith("job.yaml: 41 faults in the job's spec:\n  line 1, column 1: nmae: ")
    assert "12345" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_spec_from_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my job.yaml", "\ufeffcommand: torchrun train.py\nworking_dir: src\nresources: {gpu: 1}\n"
    )
    assert JobSpec.from_yaml(path) == JobSpec(
        name="my-job",
        command="torchrun train.py",
        working_dir=str(tmp_path / "src"),
        resources=Resources(gpu=1),
    )


def test_a_working_dir_that_is_absolute_stays(tmp_path: Path) -> None:
    assert (
        JobSpec.from_yaml(write(tmp_path / "a.yaml", "command: x\nworking_dir: /code\n")).working_dir
        == "/code"
    )


def test_a_spec_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"command: torchrun train.py\nworking_dir: .\n")))
    assert load("-") == JobSpec(name="torchrun", command="torchrun train.py", working_dir=str(Path.cwd()))


def test_files_that_are_no_spec(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.yaml", b"command: x\nname: caf\xe9\n")
    large = write(tmp_path / "large.yaml", b"#" * (1 << 20) + b"\n")
    cases = [
        (tmp_path / "none.yaml", Fault("", "there is no such file")),
        (tmp_path, Fault("", "this is a folder; name the file in it, such as job.yaml")),
        (latin, Fault("", "the file must be UTF-8 text", "byte 0xe9", 2, 10)),
        (large, Fault("", "the file is larger than 1 MiB; this is not a job's spec")),
    ]
    for path, fault in cases:
        with pytest.raises(SpecError) as caught:
            JobSpec.from_yaml(path)
        assert (caught.value.faults, caught.value.source) == ((fault,), str(path))
    with pytest.raises(SpecError, match="cannot be read"):
        JobSpec.from_yaml("a\0b")


# -- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_by_the_yaml_rules_and_env_always_as_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "job.yaml", "command: x\nworking_dir: src\nenv: {A: a}\ngroups: {worker: {count: 2}}\n"
    )
    spec = load(
        path,
        [
            "groups.worker.count=4",
            "resources={cpu: 2}",
            "env.B=0123",
            "labels.x.y=z",
            "pipefail=false",
            "slots=",
        ],
        ["A=1", "C=a=b", "D="],
    )
    assert spec.groups["worker"].count == 4
    assert spec.resources == Resources(cpu=2)
    assert spec.env == {"A": "1", "B": "0123", "C": "a=b", "D": ""}
    assert (spec.labels, spec.pipefail, spec.slots) == ({"x.y": "z"}, False, None)
    assert spec.working_dir == str(tmp_path / "src")
    assert load(path, ["working_dir=lib"]).working_dir == str(Path.cwd() / "lib")


def test_conditions_on_nodes_need_no_quotes_beside_those_of_the_shell() -> None:
    """YAML would begin a block with `>`, and take `!…` for a tag."""
    document = parse("command: x\n")
    sets = ["where.gpu_memory_gib=>= 80", "where.rack=!r1", "where.ray.io/zone=in(a,b)", "where.rdma=true"]
    override(document, sets)
    assert JobSpec.model_validate(document.data, context=document).where == {
        "gpu_memory_gib": ">= 80",
        "rack": "!r1",
        "ray.io/zone": "in(a,b)",
        "rdma": "true",
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("nodes", '--set: must be FIELD=VALUE, such as groups.worker.count=4, got "nodes"'),
        ("a..b=1", '--set: must be FIELD=VALUE, such as groups.worker.count=4, got "a..b"'),
        ("nodes=two", 'nodes: must be a whole number, or a range such as "2-4", got "two"'),
        ("nodes.x=1", "--set nodes.x: nodes is not a mapping, so it has no such field"),
        ("nods=1", "nods: unknown field, did you mean nodes?"),
        ("env.LR=1e-3", 'env.LR: must be text, write LR: "1e-3", got 1e-3'),
        ("command={a", "--set command: this is not YAML: while parsing a flow mapping expected ',' or '}', but got '<stream end>'"),
        ("resources={cpu: 1, cpu: 2}", "--set resources: must be given once, and is already on line 1"),
    ],
)  # fmt: skip
def test_a_faulty_override(override: str, expected: str) -> None:
    assert faults("command: x\nnodes: 2\n", override) == [expected]


def test_a_faulty_env_option_does_not_show_its_value() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_text("command: x\n", env=["hunter2"])
    assert caught.value.faults == (Fault("--env", "must be NAME=VALUE"),)


# -- configs and schema ----------------------------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "configs" / "ddp").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_right_and_names_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../../docs/job.schema.json"
    assert (path.parent / first.partition("$schema=")[2]).resolve() == ROOT / "docs" / "job.schema.json"
    jsonschema.validate(parse(path.read_text()).data, schema())
    spec = JobSpec.from_yaml(path)
    assert spec.working_dir == str(path.parent)
    assert jsonschema.Draft202012Validator(schema()).is_valid(spec.model_dump(mode="json"))


def test_the_configs_are_these() -> None:
    assert [path.name for path in CONFIGS] == [
        "c10d.yaml",
        "job.yaml",
        "launch.yaml",
        "plain.yaml",
        "resume.yaml",
    ]


def test_the_schema_in_docs_is_current() -> None:
    text = (ROOT / "docs" / "job.schema.json").read_text()
    assert json.loads(text) == schema(), "run: raycontrol schema > docs/job.schema.json"


@pytest.mark.parametrize(
    "text",
    [
        "nodes: 2",
        "{command: x, nods: 2}",
        "{command: x, env: {A: 1}}",
        "{command: x, nodes: 0}",
        "{command: x, groups: {A: {}}}",
        "{command: x, resources: {memory: 8}}",
        "{command: []}",
    ],
)
def test_the_schema_refuses_what_the_model_refuses(text: str) -> None:
    assert not jsonschema.Draft202012Validator(schema()).is_valid(parse(text).data)
    assert faults(text)
