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
    assert StepClock(10, 1.0).deadline(1) == 1.0
    assert make_taught_clock().deadline(1) == 1.0
