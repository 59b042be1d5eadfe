"""Accept length by hand, and the alarm: once, at its round, with its reasons."""

from __future__ import annotations

import logging

import pytest

from sglang_eagle3_ext.stats import LOG_EVERY_ROUNDS, AcceptStats


def stats(below: float = 1.1, rounds: int = 4, steps: int = 3) -> AcceptStats:
    return AcceptStats(steps, below, rounds, "name the taps")


def test_by_hand() -> None:
    counted = stats()
    assert counted.accept_length == 0.0 and counted.per_position == []
    counted.add([0, 3])
    counted.add([1, 3])
    assert counted.rounds == 4
    assert counted.accept_length == 1 + (0 + 3 + 1 + 3) / 4
    assert counted.per_position == [3 / 4, 2 / 3, 1.0]
    assert counted.line() == (
        "EAGLE3X accept length 2.75 over 4 rounds; acceptance by position 0.75 0.67 1.00"
    )


def test_the_alarm_rings_once(caplog: pytest.LogCaptureFixture) -> None:
    counted = stats()
    caplog.set_level(logging.INFO)
    counted.add([0, 0, 0])
    assert "ALARM" not in caplog.text
    counted.add([0])
    assert caplog.text.count("ALARM") == 1
    assert "accept length 1.00 over the first 4 rounds is below 1.10" in caplog.text
    assert "trained on other taps" in caplog.text and "hint: name the taps" in caplog.text
    counted.add([0] * 50)
    assert caplog.text.count("ALARM") == 1


@pytest.mark.parametrize(("below", "accepted"), [(0, 0), (1.1, 1)])
def test_no_alarm(below: float, accepted: int, caplog: pytest.LogCaptureFixture) -> None:
    counted = stats(below)
    counted.add([accepted] * 10)
    assert "ALARM" not in caplog.text


def test_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    counted = stats(below=0)
    for _ in range(2 * LOG_EVERY_ROUNDS):
        counted.add([2])
    # One from the alarm's decision, then one every thousand rounds.
    assert caplog.text.count("accept length 3.00") == 3


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[0, 1], [0, 0]], True),  # 1.25 is below 1.26
        ([[1, 0], [1, 0]], False),  # 1.5 is not
        ([[0] * 3, [3] * 9], False),  # the round that completes the count is counted whole
        ([[0] * 3], False),  # undecided
    ],
)
def test_when_the_alarm_decides(
    rounds: list[list[int]], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    counted = stats(below=1.26)
    for correct in rounds:
        counted.add(correct)
    assert ("ALARM" in caplog.text) is expected
    assert counted.alarmed is (counted.rounds >= 4)


def test_exactly_the_limit_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    counted = stats(below=1.25)
    counted.add([0, 0, 0, 1])
    assert counted.accept_length == 1.25 and counted.alarmed and "ALARM" not in caplog.text


def test_a_decision_is_final(caplog: pytest.LogCaptureFixture) -> None:
    """A draft that was good over the first rounds does not ring later."""
    counted = stats()
    counted.add([3] * 4)
    counted.add([0] * 500)
    assert counted.accept_length < 1.1 and "ALARM" not in caplog.text


def test_no_requests_and_every_depth() -> None:
    counted = stats(steps=5)
    counted.add([])
    assert counted.rounds == 0 and counted.accept_length == 0.0
    counted.add([0, 1, 2, 3, 4, 5])
    assert counted.reached == [6, 5, 4, 3, 2, 1]
    assert counted.per_position == [5 / 6, 4 / 5, 3 / 4, 2 / 3, 1 / 2]
    assert counted.accept_length == 1 + 15 / 6
