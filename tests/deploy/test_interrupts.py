"""A signal while starting ends the start, also when the exception of its handler is lost."""

import signal
from pathlib import Path

import pytest

from deploy.ray_cluster import RayCluster
from deploy.supervisor import Interrupts, StderrProgress, StopSignals


def test_an_interrupt_whose_exception_was_swallowed_ends_the_start_at_the_next_look() -> None:
    interrupts = Interrupts()
    progress = StderrProgress(interrupts)
    progress.loading(0.1)
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        progress.loading(0.2)


def test_an_interrupt_while_ray_starts_leaves_no_directory() -> None:
    made = []

    def interrupted(**settings: object) -> None:
        made.append(Path(str(settings["_temp_dir"])))
        assert made[0].is_dir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RayCluster(1, 0, start=interrupted)
    assert not made[0].exists()


@pytest.mark.parametrize(
    ("numbers", "at_once"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGHUP], False),
        ([signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGHUP, signal.SIGTERM], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
def test_only_a_first_signal_other_than_ctrl_c_lets_answers_end(
    numbers: list[signal.Signals], at_once: bool
) -> None:
    signals = StopSignals()
    for number in numbers:
        signals.handle(number, None)
    assert signals.stop.is_set()
    assert signals.at_once.is_set() is at_once
