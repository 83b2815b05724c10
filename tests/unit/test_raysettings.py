"""The settings for ``ray start``: what is printed for whom, and that the docs say the same."""

from __future__ import annotations

from pathlib import Path

from raycontrol.raysettings import SETTINGS, STORAGE, STORAGE_FOLDER, known, variables

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


def test_a_node_gets_what_its_raylet_reads() -> None:
    assert variables(head=False) == {
        "RAY_grpc_client_keepalive_timeout_ms": "16000",
        "RAY_preload_python_modules": "raycontrol.actors,pyarrow,numpy,pydantic,ray._common.pydantic_compat,"
        "ray.util.serialization_addons",
        "RAY_worker_niceness": "0",
    }


def test_the_head_gets_the_health_checks_and_the_folder_of_its_tables_too() -> None:
    assert variables(head=True, storage="/var/lib/ray") == {
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_failure_threshold": "4",
        **variables(head=False),
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": "/var/lib/ray",
    }


def test_what_is_not_installed_is_not_preloaded() -> None:
    lean = variables(head=False, is_installed=lambda module: module not in ("pyarrow", "numpy"))
    assert lean["RAY_preload_python_modules"] == (
        "raycontrol.actors,pydantic,ray._common.pydantic_compat,ray.util.serialization_addons"
    )
    assert all(setting.holds(lean[setting.name]) for setting in SETTINGS if not setting.head_only)


def test_nothing_else_of_an_environment_is_kept() -> None:
    environment = {"RAY_AUTH_TOKEN": "secret", "RAY_worker_niceness": "5", "PATH": "/bin", STORAGE: "rocksdb"}
    assert known(environment) == {"RAY_worker_niceness": "5"}


def test_the_docs_have_the_same_table() -> None:
    rows = [line for line in OPERATIONS.read_text().splitlines() if line.startswith("| `RAY_")]
    told = [
        f"| `{setting.name}` | `{setting.value}` | {'head' if setting.head_only else 'every node'} | {setting.why} |"
        for setting in SETTINGS
    ]
    assert rows[: len(told)] == told
    assert [row.split("`")[1] for row in rows[len(told) :]] == [STORAGE, STORAGE_FOLDER]
