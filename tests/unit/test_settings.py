from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raycontrol.errors import UsageError
from raycontrol.settings import Settings


def home(tmp_path: Path, text: str | None = None) -> dict[str, str]:
    if text is not None:
        (tmp_path / "settings.yaml").write_text(text, encoding="utf-8")
    return {"RAYCONTROL_HOME": str(tmp_path), "USER": "ann"}


def test_defaults_hold_where_nothing_is_set(tmp_path: Path) -> None:
    assert Settings.load({"HOME": str(tmp_path), "LOGNAME": "ann"}) == Settings(
        home="~/.raycontrol",
        cluster=None,
        address=None,
        user="ann",
        keep_days=30,
        keep_gib=50,
        package_cap_mib=512,
        min_free_mib=200,
        scratch=None,
    )


def test_variables_set_every_field(tmp_path: Path) -> None:
    settings = Settings.load(
        {
            "RAYCONTROL_HOME": str(tmp_path),
            "RAYCONTROL_CLUSTER": "blue",
            "RAY_ADDRESS": "10.0.0.1:6379",
            "RAYCONTROL_USER": "bo",
            "RAYCONTROL_KEEP_DAYS": "0.5",
            "RAYCONTROL_KEEP_GIB": "7",
            "RAYCONTROL_PACKAGE_CAP_MIB": "64",
            "RAYCONTROL_MIN_FREE_MIB": "0",
            "RAYCONTROL_SCRATCH": "/scratch",
        }
    )
    assert settings == Settings(str(tmp_path), "blue", "10.0.0.1:6379", "bo", 0.5, 7.0, 64, 0, "/scratch")
    assert (settings.package_cap_bytes, settings.min_free_bytes) == (67108864, 0)


def test_the_file_sets_what_no_variable_sets(tmp_path: Path) -> None:
    environ = home(tmp_path, "cluster: red\nkeep_days: 3\nscratch: null\n") | {"RAYCONTROL_KEEP_DAYS": "9"}
    settings = Settings.load(environ)
    assert (settings.cluster, settings.keep_days, settings.scratch) == ("red", 9, None)


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert Settings.load(home(tmp_path) | {"RAY_ADDRESS": "", "RAYCONTROL_KEEP_GIB": ""}) == Settings.load(
        home(tmp_path)
    )


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_a_file_without_settings_changes_nothing(tmp_path: Path, text: str) -> None:
    assert Settings.load(home(tmp_path, text)).keep_days == 30


def test_home_is_kept_as_written_and_resolved_on_demand() -> None:
    settings = Settings.load({"RAYCONTROL_HOME": "~/of/nobody"})
    assert settings.home == "~/of/nobody"
    assert settings.home_path == Path.home() / "of/nobody"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RAYCONTROL_HOME", "jobs", "RAYCONTROL_HOME: must be an absolute path or start with ~, got 'jobs'"),
        (
            "RAYCONTROL_SCRATCH",
            "$TMP",
            "RAYCONTROL_SCRATCH: must be an absolute path or start with ~, got '$TMP'",
        ),
        ("RAYCONTROL_KEEP_DAYS", "week", "RAYCONTROL_KEEP_DAYS: must be a number of at least 0, got 'week'"),
        ("RAYCONTROL_KEEP_GIB", "-1", "RAYCONTROL_KEEP_GIB: must be a number of at least 0, got '-1'"),
        ("RAYCONTROL_KEEP_GIB", "nan", "RAYCONTROL_KEEP_GIB: must be a number of at least 0, got 'nan'"),
        (
            "RAYCONTROL_PACKAGE_CAP_MIB",
            "0",
            "RAYCONTROL_PACKAGE_CAP_MIB: must be a whole number of at least 1, got '0'",
        ),
        (
            "RAYCONTROL_MIN_FREE_MIB",
            "1.5",
            "RAYCONTROL_MIN_FREE_MIB: must be a whole number of at least 0, got '1.5'",
        ),
    ],
)
def test_a_wrong_variable_is_named_with_its_rule_and_value(variable: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load({variable: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep_dayz: 3\n", "keep_dayz: no such setting; did you mean keep_days?"),
        ("1: 3\n", "1: no such setting; known are cluster, address, user, keep_days, keep_gib, package_cap_mib, min_free_mib, scratch, shared_dir, ray_tmpdir, rdma_preset, rdma_min_gpus, idle_gpu_warn_s, queue_policy, user_jobs, user_gpus, all_jobs, all_gpus, fence_s, spare_workers, topology_labels, url, token, token_file, insecure_http"),
        ("rdma_preset: hpc\n", "rdma_preset: must be one of auto, hcc, got 'hpc'"),
        ("insecure_http: maybe\n", "insecure_http: must be 1 or 0, got 'maybe'"),
        ("token: a secret\n", "token: must be 1 to 512 printable ASCII characters without spaces"),
        ("rdma_min_gpus: 0\n", "rdma_min_gpus: must be a whole number of at least 1, got 0"),
        ("fence_s: 24\n", "fence_s: must be from 25 seconds, longer than Ray takes to give a silent host up, to 3600, got 24"),
        ("fence_s: 1h\n", "fence_s: must be from 25 seconds, longer than Ray takes to give a silent host up, to 3600, got '1h'"),
        ("home: /elsewhere\n", "home: cannot be set by a file inside it; set RAYCONTROL_HOME"),
        ("keep_days: yes\n", "keep_days: must be a number of at least 0, got 'yes'"),
        ("keep_days: true\n", "keep_days: must be a number of at least 0, got True"),
        ("cluster: 12\n", "cluster: must be text, got 12"),
        ('cluster: "a\\nb"\n', "cluster: must be 1 to 256 printable characters without space around them, got 'a\\nb'"),
        ("- cluster\n", "must hold `name: value` lines"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_field_rule_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load(home(tmp_path, text))
    assert str(caught.value) == f"{tmp_path}/settings.yaml: {message}"


@pytest.mark.parametrize(
    "text", ["a: [1\n", "keep_days: 1\nkeep_days: 2\n", "a: !!python/object:os.system {}\n", "\x01"]
)
def test_what_is_not_yaml_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load(home(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path}/settings.yaml: not valid YAML: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"settings\.yaml: not valid YAML"):
        Settings.load(home(tmp_path))


def test_a_folder_in_place_of_the_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").mkdir()
    with pytest.raises(UsageError, match=r"settings\.yaml: cannot be read: Is a directory"):
        Settings.load(home(tmp_path))


def test_the_description_says_where_each_value_came_from_and_hides_logins(tmp_path: Path) -> None:
    environ = home(tmp_path, "keep_gib: 5\n") | {"RAY_ADDRESS": "ray://ann:s3cret@head:10001"}
    assert Settings.load(environ).describe() == {
        "home": f"{tmp_path} (RAYCONTROL_HOME)",
        "cluster": "not set (default)",
        "address": "ray://head:10001 (RAY_ADDRESS)",
        "user": "ann (default)",
        "keep_days": "30 (default)",
        "keep_gib": f"5 ({tmp_path}/settings.yaml)",
        "package_cap_mib": "512 (default)",
        "min_free_mib": "200 (default)",
        "scratch": "not set (default)",
        "shared_dir": "not set (default)",
        "ray_tmpdir": "/tmp (default)",
        "rdma_preset": "auto (default)",
        "rdma_min_gpus": "8 (default)",
        "idle_gpu_warn_s": "600 (default)",
        "queue_policy": "traverse (default)",
        "user_jobs": "not set (default)",
        "user_gpus": "not set (default)",
        "all_jobs": "not set (default)",
        "all_gpus": "not set (default)",
        "fence_s": "50 (default)",
        "spare_workers": "1 (default)",
        "topology_labels": "topology.kubernetes.io/zone,ray.io/availability-zone,rack,switch (default)",
        "url": "not set (default)",
        "token": "not set (default)",
        "token_file": "not set (default)",
        "insecure_http": "False (default)",
    }


def test_a_wrong_address_is_shown_without_its_login(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load({"RAY_ADDRESS": "ray://ann:s3cret@head:10001 "})
    assert "s3cret" not in str(caught.value)


def test_settings_cross_a_process_border(tmp_path: Path) -> None:
    settings = Settings.load(home(tmp_path))
    assert pickle.loads(pickle.dumps(settings)) == settings


# Over HTTP


def test_url_and_token_come_from_the_environment_and_the_token_is_never_shown(tmp_path: Path) -> None:
    environ = {"RAYCONTROL_URL": "https://head:8642/", "RAYCONTROL_TOKEN": "rct_s3cret"}
    settings = Settings.load(home(tmp_path) | environ)
    assert (settings.url, settings.http_token()) == ("https://head:8642", "rct_s3cret")
    assert settings.describe()["token"] == "set (RAYCONTROL_TOKEN)"
    assert "s3cret" not in f"{settings!r} {settings.describe()} {settings.variables()}"


def test_the_token_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("rct_s3cret\n")
    settings = Settings.load(home(tmp_path) | {"RAYCONTROL_TOKEN_FILE": str(tmp_path / "token")})
    assert settings.http_token() == "rct_s3cret"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its content must be 1 to 512 printable ASCII characters without spaces"),
        (b"two s3crets", "its content must be 1 to 512 printable ASCII characters without spaces"),
        (b"\xff\xfe", "its content must be 1 to 512 printable ASCII characters without spaces"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_token_file_that_holds_none_is_named_without_its_content(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Settings(token_file=str(file)).http_token()
    assert str(caught.value) == f"RAYCONTROL_TOKEN_FILE: {file}: {message}"


def test_a_wrong_token_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load(home(tmp_path) | {"RAYCONTROL_TOKEN": "rct_s3cret\n"})
    assert str(caught.value) == (
        "RAYCONTROL_TOKEN: must be 1 to 512 printable ASCII characters without spaces"
    )


@pytest.mark.parametrize(
    "url",
    [
        "head:8642",
        "ftp://head",
        "https://",
        "https://head:port",
        "https://head:99999",
        "https://head/?token=a",
        "https://head/#a",
        "https://he ad",
        "https://h\u00e9ad",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        UsageError, match=r"^RAYCONTROL_URL: must be a URL such as https://head:8642, without"
    ):
        Settings.load(home(tmp_path) | {"RAYCONTROL_URL": url})


def test_a_url_with_a_login_is_refused_and_shown_without_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load(home(tmp_path) | {"RAYCONTROL_URL": "https://ann:s3cret@head"})
    assert str(caught.value) == (
        "RAYCONTROL_URL: must be a URL such as https://head:8642, without a user, a query or a fragment, "
        "got 'https://head'"
    )


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("True", True), ("0", False), ("false", False)])
def test_a_flag_is_1_or_0(tmp_path: Path, text: str, flag: bool) -> None:
    assert Settings.load(home(tmp_path) | {"RAYCONTROL_INSECURE_HTTP": text}).insecure_http is flag


def test_topology_labels_are_names_with_commas_or_a_list(tmp_path: Path) -> None:
    assert Settings.load(home(tmp_path, "topology_labels: [row, rack]\n")).topology_labels == "row,rack"
    environ = home(tmp_path, "") | {"RAYCONTROL_TOPOLOGY_LABELS": "row, rack"}
    assert Settings.load(environ).topology_labels == "row,rack"
    with pytest.raises(UsageError, match="must be names of labels with commas between them"):
        Settings.load(environ | {"RAYCONTROL_TOPOLOGY_LABELS": "row;rack"})
