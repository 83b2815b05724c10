"""What actors read of their host's settings when they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycontrol import actors


def test_wrong_settings_keep_no_actor_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that cannot start counts as lost, and uses up a job's retries."""
    monkeypatch.setenv("RAYCONTROL_HOME", str(tmp_path))
    (tmp_path / "settings.yaml").write_text("scratch: /big/disk\n")
    assert actors._own_settings().scratch == "/big/disk"
    (tmp_path / "settings.yaml").write_text("scratch: /big/disk\nfence_s: 10\n")
    assert (actors._own_settings().scratch, actors._own_settings().spare_workers) == (None, 1)
