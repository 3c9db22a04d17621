"""What follows a failure: soon again with less, then not for a long while, then one attempt at a time."""

from hypothesis import given
from hypothesis import strategies as st

from node.restarts import MAX_RESTRAINT, Attempt, Restarts


def fail(book: Restarts, *codes: str, every_s: float = 5.0, now_s: float = 1000.0) -> tuple[Restarts, list[Attempt]]:
    attempts = []
    for number, code in enumerate(codes):
        book, attempt = book.after_failure(code, ran_s=every_s, now_s=now_s + number * every_s, chance=0.0)
        attempts.append(attempt)
    return book, attempts


def test_crashes_make_limits_smaller_and_then_the_node_stops_trying() -> None:
    _, attempts = fail(Restarts(), *["ENGINE"] * 5)
    assert [attempt.restraint for attempt in attempts] == [1, 2, 3, 4, 4]
    assert [attempt.wait_s for attempt in attempts] == [1.0, 2.0, 4.0, 8.0, 900.0]
    assert [attempt.pause for attempt in attempts] == ["", "", "", "", "ENGINE 5 times in 10 min"]


def test_failures_that_less_would_not_cure_leave_the_limits_alone() -> None:
    _, attempts = fail(Restarts(), "ENGINE_UNTRUSTED", "UNREACHABLE", "ENGINE", "WEIGHTS_UNFIT")
    assert [attempt.restraint for attempt in attempts] == [0, 0, 1, 1]


def test_a_model_that_is_refused_is_not_tried_again_soon() -> None:
    _, attempts = fail(Restarts(), "MODEL_REFUSED")
    assert attempts == [Attempt(900.0, 0, "MODEL_REFUSED")]


def test_rare_failures_never_stop_the_node() -> None:
    _, attempts = fail(Restarts(), *["ENGINE"] * 40, every_s=200.0)
    assert not any(attempt.pause for attempt in attempts)


def test_after_a_pause_one_attempt_decides() -> None:
    book, _ = fail(Restarts(), *["ENGINE"] * 5)
    again, attempt = book.after_failure("ENGINE", ran_s=3.0, now_s=10_000.0, chance=0.0)
    assert attempt.pause
    assert again.is_trial
    held, attempt = book.after_failure("ENGINE", ran_s=300.0, now_s=10_000.0, chance=0.0)
    assert not attempt.pause
    assert not held.is_trial


def test_limits_relax_an_hour_after_the_last_crash() -> None:
    book, _ = fail(Restarts(), "ENGINE", "ENGINE")
    _, attempt = book.after_failure("ENGINE", ran_s=3600.0, now_s=1000.0 + 3700.0, chance=0.0)
    assert attempt.restraint == 1


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.sampled_from(["ENGINE", "UNREACHABLE", "MODEL_REFUSED"]))))
def test_no_loop_makes_more_attempts_than_it_may(failures: list[tuple[float, str]]) -> None:
    """Whatever fails and when: any `window_s` holds at most `max_failures` starts, the waits obeyed."""
    book, now_s, starts = Restarts(), 0.0, [0.0]
    for ran_s, code in failures:
        now_s += ran_s
        book, attempt = book.after_failure(code, ran_s=ran_s, now_s=now_s, chance=0.999)
        assert 0 <= attempt.restraint <= MAX_RESTRAINT
        now_s += attempt.wait_s
        starts.append(now_s)
        assert sum(start > now_s - book.window_s for start in starts) <= book.max_failures
