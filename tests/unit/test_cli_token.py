"""``token create``, ``token list``, ``token revoke`` on a client without a cluster."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from raycontrol.access import Role, TokenInfo
from raycontrol.errors import ControllerUnavailable
from tests.unit.test_cli_nodes import Shell

TEXT = f"rct_k3x9abcd_{'s' * 43}"
DAY_S = 86_400.0


def test_a_new_token_is_printed_once_and_the_advice_goes_to_stderr() -> None:
    shell = Shell()
    assert shell("token", "create", "laptop", "--role", "user") == 0
    assert shell.stdout == f"{TEXT}\n"
    assert shell.stderr == "token laptop is shown only now; keep it like a password\n"
    assert ("create_token", ("laptop", Role.USER, None, 90 * DAY_S)) in shell.client.calls


def test_a_token_may_live_for_days_or_for_ever_and_stand_for_somebody_else() -> None:
    shell = Shell()
    assert shell("token", "create", "a", "--role", "viewer", "--days", "0.5", "--user", "bob") == 0
    assert shell("token", "create", "b", "--role", "admin", "--days", "0") == 0
    asked = [values for name, values in shell.client.calls if name == "create_token"]
    assert asked == [("a", Role.VIEWER, "bob", 43_200.0), ("b", Role.ADMIN, None, None)]


def test_a_token_can_go_to_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    shell, file = Shell(), tmp_path / "token"
    assert shell("token", "create", "laptop", "--role", "user", "--output", str(file)) == 0
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (f"{TEXT}\n", 0o600)
    assert shell.stdout == ""
    assert shell.stderr == f"token laptop is in {file} and shown nowhere; keep it like a password\n"


def test_a_file_that_is_there_stays_and_no_token_is_made(tmp_path: Path) -> None:
    shell, file = Shell(), tmp_path / "token"
    file.write_text("mine")
    for path in (file, tmp_path / "absent" / "token"):
        assert shell("token", "create", "laptop", "--role", "user", "--output", str(path)) == 2
    assert "No such file or directory" in shell.stderr
    assert file.read_text() == "mine"
    assert shell.client.known_tokens == []


def test_no_file_is_left_when_there_is_no_token(tmp_path: Path) -> None:
    shell, file = Shell(), tmp_path / "token"
    shell.client.token_error = ControllerUnavailable("it does not answer")
    assert shell("token", "create", "laptop", "--role", "user", "--output", str(file)) == 125
    assert not file.exists()


def test_json_has_the_text_only_where_it_is_printed(tmp_path: Path) -> None:
    shell = Shell()
    made = shell.json("token", "create", "laptop", "--role", "user")
    assert (made["name"], made["role"], made["text"]) == ("laptop", "user", TEXT)
    kept = shell.json("token", "create", "other", "--role", "user", "--output", str(tmp_path / "token"))
    assert "text" not in kept
    assert TEXT not in shell.stdout + shell.stderr


def test_tokens_are_listed_with_how_they_are() -> None:
    shell = Shell()
    facts = {"role": Role.USER, "user": "ada", "created_at": 1000.0}
    shell.client.known_tokens = [
        TokenInfo(name="old", expires_at=2000.0, **facts),
        TokenInfo(name="lost", revoked_at=1500.0, **facts),
        TokenInfo(name="laptop", **facts),
    ]
    assert shell("token", "list") == 0
    lines = shell.stdout.splitlines()
    assert lines[0].split() == ["NAME", "ROLE", "USER", "CREATED", "EXPIRES", "STATE"]
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:]] == [
        ("old", "expired"),
        ("lost", "revoked"),
        ("laptop", "valid"),
    ]
    assert [item["name"] for item in shell.json("token", "list")] == ["old", "lost", "laptop"]


def test_a_token_is_revoked_by_its_name() -> None:
    shell = Shell()
    shell("token", "create", "laptop", "--role", "user")
    assert shell("token", "revoke", "laptop") == 0
    assert shell.stdout == "laptop revoked\n"
    assert shell.json("token", "revoke", "laptop")["revoked_at"] is not None
    assert shell("token", "revoke", "other") == 2
    assert "there is no token 'other'" in shell.stderr


def test_a_wrong_role_is_named_with_the_right_ones() -> None:
    shell = Shell()
    assert shell("token", "create", "laptop", "--role", "root") == 2
    assert "--role: must be one of viewer, user, operator, admin, got root" in shell.stderr
    assert shell.client.known_tokens == []


def test_the_help_of_each_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("token create", "token list", "token revoke"):
        assert Shell()(*command.split(), "--help") == 0
        text = capsys.readouterr().out
        assert f"  raycontrol {command}" in text
        assert "--json" in text
