from __future__ import annotations

from dataclasses import replace

from raycontrol import job
from raycontrol.job import Instance, Job
from raycontrol.jobrows import row_of
from raycontrol.plan import Facts
from raycontrol.spec import JobSpec
from raycontrol.status import JobState, Note, Reason
from raycontrol.store import Store
from tests.api.fakes import Api, adas_job

SPEC = {
    "name": "digits",
    "command": "torchrun train.py",
    "env": {"STEPS": "3", "WANDB_API_KEY": "hunter2"},
    "secret_env": {"HF_TOKEN": "hf_verysecret"},
}

FACTS = Facts(
    instance="master-0",
    ip="10.0.0.7",
    node_name="host-a",
    ports={"master": "29500", "probe": "29501"},
    interface="eth0",
    code_dir="/code",
    output_dir="/out",
)
MASTER = Instance("master-0", "master", "master", 0, "n", "host-a", "10.0.0.7", facts=FACTS)


def stored(api: Api, *instances: Instance) -> None:
    """A job of ada's, in the store and behind the door."""
    spec = JobSpec.from_dict(SPEC).without_secrets()
    new = Job(id="digits-ab12cd", cluster="test", spec=spec, user="ada", submitted_at=1.0)
    note = Note(
        at=1.0, kind="Submitted", state=JobState.QUEUED, reason=Reason.SUBMITTED, attempt=0, message=""
    )
    with Store(api.home) as store:
        store.add(row_of(replace(new, instances=instances)), note)
    api.door.put(adas_job())


def test_before_nodes_have_reported_the_plan_is_that_of_the_spec(api: Api) -> None:
    stored(api)
    answer = api.get("/api/v1/jobs/digits-ab12cd/plan", by="user")
    assert (answer.status_code, answer.json()["attempt"]) == (200, None)
    environment = answer.json()["plan"]["environment"]["master-0"]
    assert environment["MASTER_ADDR"] == "<ip of master-0>"


def test_the_plan_of_an_attempt_has_its_addresses(api: Api) -> None:
    stored(api, MASTER)
    answer = api.get("/api/v1/jobs/digits-ab12cd/plan").json()
    assert (answer["attempt"], answer["plan"]["environment"]["master-0"]["MASTER_ADDR"]) == (0, "10.0.0.7")


def test_showing_a_plan_touches_no_plan_of_the_thread_that_advances_jobs(api: Api) -> None:
    stored(api, MASTER)
    before = dict(job._plans)
    assert api.get("/api/v1/jobs/digits-ab12cd/plan").json()["attempt"] == 0
    assert job._plans == before


def test_secrets_are_masked_for_everybody(api: Api) -> None:
    stored(api)
    answer = api.get("/api/v1/jobs/digits-ab12cd/plan", by="admin")
    environment = answer.json()["plan"]["environment"]["master-0"]
    assert environment["STEPS"] == "3"
    assert (environment["WANDB_API_KEY"], environment["HF_TOKEN"]) == ("(masked)", "(secret)")
    assert "hunter2" not in answer.text
    assert "hf_verysecret" not in answer.text


def test_a_job_that_this_store_does_not_have_has_no_plan_here(api: Api) -> None:
    api.door.put(adas_job())
    assert api.get("/api/v1/jobs/digits-ab12cd/plan").status_code == 404
