"""What a verdict keeps of a log's end."""

from __future__ import annotations

from raycontrol.verdicts import LONGEST_WORDS, VERDICT_LINES, last_words

RULE = "-" * 74


def test_the_last_lines_without_what_is_empty() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert last_words([*lines, "", "\0"]) == tuple(lines[-VERDICT_LINES:])


def test_a_message_between_rules_is_kept_from_its_beginning() -> None:
    message = [RULE, "There are not enough slots", *["advice"] * 30, RULE]
    assert last_words(["before", *message, "\0"]) == tuple(message)


def test_a_message_that_ended_earlier_and_an_endless_one_are_not() -> None:
    after = [f"line {number}" for number in range(VERDICT_LINES)]
    assert last_words([RULE, "old", RULE, *after]) == tuple(after)
    assert len(last_words([RULE, *["advice"] * 200, RULE])) == LONGEST_WORDS
