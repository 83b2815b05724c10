from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from raycontrol.ignore import is_ignored, parse


def ignored(text: str, path: str) -> bool:
    """Whether a walk ignores ``path`` (a folder when it ends in a slash), itself or by a folder above it."""
    rules = [parse(text.encode(), b"/top")]
    parts = path.rstrip("/").split("/")
    for depth in range(1, len(parts) + 1):
        is_folder = depth < len(parts) or path.endswith("/")
        if is_ignored(f"/top/{'/'.join(parts[:depth])}".encode(), is_folder, rules):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("*.pyc", "a/b/x.pyc", True),
        ("*.pyc", "x.py", False),
        ("/data", "data/x", True),
        ("/data", "src/data/x", False),
        ("data/", "data", False),
        ("data/", "src/data/x", True),
        ("a/b", "c/a/b", False),
        ("**/b", "c/a/b", True),
        ("a/**", "a/b/c", True),
        ("a/**/c", "a/c", True),
        ("*\n!*/\n!*.py", "src/deep/a.py", False),
        ("*\n!*/\n!*.py", "src/a.txt", True),
        ("build/*\n!build/keep/", "build/keep/x", False),
        ("build/\n!build/keep", "build/keep", True),
        ("# comment\n\\#file\n\\!file", "#file", True),
        ("# comment\n\\#file\n\\!file", "!file", True),
        ("name \nkept\\ ", "name", True),
        ("name \nkept\\ ", "kept ", True),
        ("x\r\ny\r\n", "x", True),
        ("[ab][!c-e]", "af", True),
        ("[ab][!c-e]", "ad", False),
        ("[]x]", "]", True),
        ("v[[:digit:]]", "v1", True),
        ("[open", "[open", False),
        ("a\\*b", "a*b", True),
        ("a\\*b", "axb", False),
        ("\\", "\\", False),
        ("\ufeffbom", "bom", True),
    ],
)
def test_one_file_of_rules(text: str, path: str, expected: bool) -> None:
    assert ignored(text, path) is expected


ATOMS = ["a", "b", "ab", "*", "**", "?", "a*", "*b", "[ab]", "[!a]", "\\a", "a ", ".a"]
PATHS = ["a", "b", "ab", ".a", "a/a", "a/b", "b/a", "b/ab", "a/b/a", "a/b/b", "ab/b/a", "b/.a/a", "b/b/b/b"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_random_rules_mean_what_they_mean_to_git(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "HOME": str(tmp_path),
    }
    subprocess.run(["git", "init", "-q", tmp_path], check=True, env=environ)
    chance = random.Random(2)
    for _ in range(60):
        text = "\n".join(random_line(chance) for _ in range(chance.randint(1, 5)))
        (tmp_path / ".gitignore").write_text(text)
        asked = subprocess.run(
            ["git", "check-ignore", "--no-index", "--stdin"],
            input="\n".join(PATHS),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
        )
        assert asked.stdout.split("\n")[:-1] == [path for path in PATHS if ignored(text, path)], text


def random_line(chance: random.Random) -> str:
    parts = [chance.choice(ATOMS) for _ in range(chance.choice([1, 1, 2, 3]))]
    return (
        chance.choice(["", "", "!"])
        + chance.choice(["", "/"])
        + "/".join(parts)
        + chance.choice(["", "", "/"])
    )
