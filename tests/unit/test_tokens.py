"""The text of tokens, and what is kept of it."""

from __future__ import annotations

import re

import pytest

from raycontrol.errors import UsageError
from raycontrol.tokens import Parsed, checked_name, checked_ttl, checked_user, new_token, parsed, same

TEXT = "rct_k3x9abcd_" + "A-_b" * 10 + "xyz"


def test_a_token_is_an_id_and_a_secret_of_32_bytes() -> None:
    assert re.fullmatch(r"rct_[a-z0-9]{8}_[A-Za-z0-9_-]{43}", new_token())
    assert len({new_token() for _ in range(100)}) == 100


def test_a_parsed_token_holds_a_hash_and_not_the_secret() -> None:
    found = parsed(TEXT)
    assert found == Parsed("k3x9abcd", "c4d78744e2986cdd94e40b77440d12a8ad46c9f57cc460fe7c2e8138989a53dd")
    assert "A-_b" not in repr(found)


@pytest.mark.parametrize(
    "text",
    ["", "rct_", TEXT[:-1], TEXT + "x", TEXT + "\n", " " + TEXT, TEXT.upper(), "rct_k3x9abcd_" + "ü" * 43, "\0"],
)  # fmt: skip
def test_any_other_text_is_no_token(text: str) -> None:
    assert parsed(text) is None


def test_only_the_kept_digest_is_the_same() -> None:
    assert same("ab" * 32, "ab" * 32)
    assert not same("ab" * 32, "ac" * 32)
    assert not same("", "ab" * 32)
    assert not same("\udcff", "ab" * 32)


def test_nothing_is_the_same_as_an_unknown_token_not_even_what_it_is_compared_with() -> None:
    assert not same("0" * 64, None)
    assert not same("ab" * 32, None)


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 64, "a/b", "a\n"])
def test_a_name_that_no_job_could_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name of a token: must be 1 to 63 letters"):
        checked_name(name)


def test_a_user_must_be_a_word_and_a_lifetime_a_time() -> None:
    assert (checked_name("laptop.1"), checked_user("Änne B"), checked_ttl(0.5)) == ("laptop.1", "Änne B", 0.5)
    for user in ("", " ada", "a\nb", "x" * 257):
        with pytest.raises(UsageError, match="user of a token: must be 1 to 256 printable characters"):
            checked_user(user)
    for ttl_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="lifetime of a token: must be more than 0 seconds"):
            checked_ttl(ttl_s)
