from router_service.step_clock import StepClock


def make_taught_clock() -> StepClock:
    clock = StepClock(factor=10, floor_seconds=1.0)
    for _ in range(200):
        clock.observe(4, 0.05)
        clock.observe(1000, 2.05)
    return clock


def test_the_deadline_grows_with_the_tokens_of_the_busiest_rank() -> None:
    clock = make_taught_clock()
    assert abs(clock.predict(1000) - 2.05) < 0.05
    assert abs(clock.deadline(5000) / 10 - 10.05) < 0.2


def test_the_deadline_never_falls_below_the_floor() -> None:
    assert make_taught_clock().deadline(1) == 1.0


def test_the_first_step_may_take_a_multiple_of_the_floor() -> None:
    assert StepClock(10, 2.0).deadline(500) == 20.0


def test_the_first_large_step_may_take_as_long_as_the_small_ones_that_it_would_be() -> None:
    clock = StepClock(10, 1.0)
    clock.observe(1, 0.5)
    assert clock.deadline(1600) == 10 * 100 * 0.5
    assert clock.deadline(8) == 10 * 0.5


def test_one_large_step_is_enough_to_know_that_the_next_will_take_as_long() -> None:
    clock = StepClock(3, 1.0)
    clock.observe(1000, 40.0)
    assert clock.deadline(1000) == 3 * 40.0
