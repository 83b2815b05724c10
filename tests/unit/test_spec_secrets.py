"""``secret_env``: values that a spec carries to the cluster and shows nowhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raycontrol.backends import plan_of
from raycontrol.client import Client
from raycontrol.errors import SpecError, UsageError
from raycontrol.job import Job, Submission
from raycontrol.jobrows import read_job, row_of
from raycontrol.plan import orders, render, to_json
from raycontrol.spec import JobSpec, build, load, schema

HIDDEN = "hf_nobody-may-see-this"


def spec(**values: Any) -> JobSpec:
    return JobSpec.from_dict(
        {"command": "true", "name": "digits", "secret_env": {"HF_TOKEN": HIDDEN}, **values}
    )


def fault(**values: Any) -> str:
    with pytest.raises(SpecError) as caught:
        spec(**values)
    assert HIDDEN not in str(caught.value)
    assert HIDDEN not in repr(caught.value)
    return str(caught.value)


def test_a_value_is_in_no_repr_and_no_dump() -> None:
    made = spec()
    submission = Submission("digits-1", made, "ada", None, "0.1.0")
    shown = [repr(made), str(made), repr(submission), repr(made.model_dump()), made.model_dump_json()]
    assert [text for text in shown if HIDDEN in text] == []
    assert made.secrets() == {"HF_TOKEN": HIDDEN}
    assert pickle.loads(pickle.dumps(submission)).spec.secrets() == {"HF_TOKEN": HIDDEN}


def test_a_spec_can_be_revealed_for_its_way_to_a_cluster() -> None:
    document = json.loads(json.dumps(spec(env={"LR": "0.1"}).revealed()))
    assert JobSpec.from_dict(document).secrets() == {"HF_TOKEN": HIDDEN}
    assert JobSpec.from_dict(document) == spec(env={"LR": "0.1"})


def test_what_is_kept_of_a_job_has_the_names_and_no_values() -> None:
    job = Job("digits-1", "east", spec().without_secrets(), "ada", 1000.0)
    assert '"secret_env":{"HF_TOKEN":null}' in row_of(job).doc
    assert read_job(row_of(job)) == job


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"secret_env": {"A": 5}}, "secret_env.A: must be text; put the value in quotes, got a value that is not shown"),
        ({"secret_env": {"A": [HIDDEN]}}, "secret_env.A: must be text, got a value that is not shown"),
        ({"secret_env": {"A": f"{HIDDEN}\0"}}, "secret_env.A: must not contain a NUL byte, got a value that is not shown"),
        ({"secret_env": {"A": "**********"}}, "secret_env.A: must be the value itself, not what is shown for it, got a value that is not shown"),
        ({"secret_env": {"RANK": HIDDEN}}, "secret_env.RANK: is set by raycontrol itself and must not be given"),
        ({"secret_env": {"A B": HIDDEN}}, "secret_env.A B: names of variables must not be empty or contain '=', spaces or NUL bytes"),
        ({"secret_env": f"A={HIDDEN}"}, "secret_env: must be a mapping, got text"),
        ({"secret_env": [HIDDEN]}, "secret_env: must be a mapping, got a list of 1"),
        ({"env": {"HF_TOKEN": "x"}}, "env.HF_TOKEN: must not be given in secret_env too"),
        ({"groups": {"master": {"env": {"HF_TOKEN": None}}}}, "groups.master.env.HF_TOKEN: must not be given in secret_env too"),
        ({"mode": "ray", "secret_env": {"RAY_AUTH_TOKEN": HIDDEN}}, "secret_env.RAY_AUTH_TOKEN: is set by raycontrol itself in mode ray and must not be given"),
    ],
)  # fmt: skip
def test_a_fault_never_shows_the_value(values: dict[str, Any], expected: str) -> None:
    assert fault(**values) == expected


def test_a_faulty_text_does_not_show_it_either() -> None:
    for text in (f"!{HIDDEN}", f"*{HIDDEN}", f"!{HIDDEN} x", f"[{HIDDEN}", f"x\n  HF_TOKEN: {HIDDEN}"):
        with pytest.raises(SpecError) as caught:
            JobSpec.from_text(f"command: x\nsecret_env:\n  HF_TOKEN: {text}\n")
        assert HIDDEN not in str(caught.value)


def test_null_is_taken_from_the_environment_of_whoever_submits() -> None:
    made = spec(secret_env={"HF_TOKEN": None, "OTHER": "given", "EMPTY": None})
    taken = made.with_secrets({"HF_TOKEN": HIDDEN, "OTHER": "not this", "EMPTY": ""})
    assert taken.secrets() == {"HF_TOKEN": HIDDEN, "OTHER": "given", "EMPTY": ""}
    with pytest.raises(UsageError, match="secret_env: HF_TOKEN, EMPTY are not set in this environment"):
        made.with_secrets({"OTHER": "x"})
    with pytest.raises(UsageError, match="secret_env: HF_TOKEN, EMPTY are without a value"):
        made.secrets()
    with pytest.raises(SpecError, match=r"secret_env\.HF_TOKEN: must be text that UTF-8 can hold"):
        made.with_secrets({"HF_TOKEN": "\udcff", "EMPTY": ""})


def test_a_client_takes_them_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(
        UsageError, match="secret_env: HF_TOKEN is not set in this environment; export it first"
    ):
        Client(address="192.0.2.1:1").submit(spec(secret_env={"HF_TOKEN": None}))


def test_a_command_line_has_names_only(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"command: x\nsecret_env: {{HF_TOKEN: {HIDDEN}}}\n")
    assert load(file, secret_env=["WANDB"]).secret_env.keys() == {"HF_TOKEN", "WANDB"}
    assert load(file, ["secret_env.HF_TOKEN="]).secret_env == {"HF_TOKEN": None}
    assert build({"command": "true"}, secret_env=["a.b"]).secret_env == {"a.b": None}
    for given in ({"secret_env": [f"HF_TOKEN={HIDDEN}"]}, {"overrides": [f"secret_env.HF_TOKEN={HIDDEN}"]}):
        with pytest.raises(
            SpecError, match="the value of a secret must not stand on a command line"
        ) as caught:
            build({"command": "true"}, **given)
        assert HIDDEN not in str(caught.value)


def test_the_schema_knows_it() -> None:
    document = {"command": "true", "secret_env": {"HF_TOKEN": None, "WANDB": "x"}}
    jsonschema.validate(document, schema())


# Plans and orders.


def test_a_plan_shows_that_there_is_a_secret() -> None:
    plan = plan_of(spec(nodes=2, env={"LR": "0.1"}))
    assert "  HF_TOKEN=(secret)  # secret_env" in render(plan).splitlines()
    assert HIDDEN not in render(plan) + json.dumps(to_json(plan)) + repr(plan)
    assert plan.environment["worker-0"]["HF_TOKEN"] == "(secret)"
    assert plan.origins["worker-0"]["HF_TOKEN"] == "secret_env"


def test_orders_carry_the_values_beside_the_plan_in_the_first_stage() -> None:
    plan = plan_of(spec(nodes=2))
    first, second = (orders(plan, stage, "worker-0", {"HF_TOKEN": HIDDEN}) for stage in (0, 1))
    assert (first.secret_env, second.secret_env) == ({"HF_TOKEN": HIDDEN}, {})
    assert "HF_TOKEN" not in first.environment
    assert HIDDEN not in repr(first)


@pytest.mark.parametrize("mode", ["ddp", "mpi", "horovod", "ray"])
def test_no_mode_writes_them_into_files(mode: str) -> None:
    plan = plan_of(spec(mode=mode, nodes=2))
    assert HIDDEN not in repr(plan)
    assert "(secret)" not in repr(plan.files)
