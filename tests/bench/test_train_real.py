"""The judgement of `make train-real`: paired, and strict about chance."""

import math

from tests.bench.train_real import SETTINGS, judge, paired

FALSE, TRUE = [False], [True]


def verdicts(before: list[bool], after: list[bool], *, difference: float = 0.0) -> bool:
    return all(figure.passed for figure in judge(before, after, max_logit_difference=difference))


def test_the_interval_is_of_the_difference_task_by_task() -> None:
    before, after = FALSE * 60 + TRUE * 40, FALSE * 40 + TRUE * 60
    gain, half = paired(before, after)
    assert math.isclose(gain, 0.2)
    assert math.isclose(half, 1.96 * math.sqrt((0.2 - 0.04) * 100 / 99 / 100))
    assert verdicts(before, after)


def test_small_gains_and_gains_by_chance_fail() -> None:
    assert not verdicts(FALSE * 200 + TRUE * 200, FALSE * 170 + TRUE * 230)  # sure, but 7.5 points
    assert not verdicts(FALSE * 10 + TRUE * 10, TRUE * 9 + FALSE * 5 + TRUE * 2 + FALSE * 4)  # 5 points
    by_chance = (FALSE * 6 + TRUE * 6, TRUE * 5 + FALSE * 1 + FALSE * 3 + TRUE * 3)  # 17 points, over 12 tasks
    assert paired(*by_chance)[0] > 0.10
    assert not verdicts(*by_chance)


def test_an_export_that_differs_fails() -> None:
    before, after = FALSE * 60 + TRUE * 40, FALSE * 40 + TRUE * 60
    assert not verdicts(before, after, difference=1e-6)


def test_the_run_evaluates_its_first_and_last_version() -> None:
    assert SETTINGS.num_versions % SETTINGS.evaluate_every == 0
