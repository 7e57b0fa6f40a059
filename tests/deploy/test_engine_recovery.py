"""An engine dies, hangs and does not start: what the launcher does about it. Processes and time are the test's."""

from dataclasses import dataclass, field
from typing import Any

from deploy.engine_recovery import (
    MAX_IN_A_ROW,
    RETRY_SECONDS,
    STEADY_SECONDS,
    EngineRecovery,
)
from deploy.pulse import HANG_SECONDS, MIN_LOOKS, PULSE_SECONDS
from router_service.engine_life import EngineLife

PORTS = 61001, 61002, 61003
LIMIT_SECONDS = 30.0


@dataclass
class Process:
    """calls: what came of each, (False, None) while it goes on"""

    ports: tuple[int, int, int] = PORTS
    asked: list[Any] = field(default_factory=list)
    calls: dict[str, tuple[bool, Any]] = field(default_factory=dict)
    is_head_away: bool = False
    lost_reasons: list[str] = field(default_factory=list)
    """That engines which start were told of the one before."""

    def can_start(self) -> bool:
        return not self.is_head_away

    def start(self, life: EngineLife, fingerprint: str) -> str:
        self.asked.append((life.number, life.ports, fingerprint))
        self.lost_reasons.append(life.lost_reason)
        return "start"

    def run(self, started: Any) -> None:
        self.asked.append(f"run {started}")

    def kill(self) -> None:
        self.asked.append("kill")

    def pulse(self) -> str:
        self.asked.append("pulse")
        return "pulse"

    def result(self, call: str) -> tuple[bool, Any]:
        return self.calls.get(call, (False, None))

    def take(self) -> list[Any]:
        asked, self.asked = self.asked, []
        return asked


class Cell:
    def __init__(self) -> None:
        self.now, self.process, self.num_back = 100.0, Process(), 0
        self.recovery = EngineRecovery(
            self.process,
            fingerprint=lambda: "seventh",
            on_back=self._back,
            limit_seconds=LIMIT_SECONDS,
            clock=lambda: self.now,
        )

    def _back(self) -> None:
        self.num_back += 1

    def tick(self, seconds: float = 0.0) -> str | None:
        self.now += seconds
        return self.recovery.tick()

    def lose_and_start(self) -> str | None:
        self.process.calls["start"] = True, "engine"
        failure = self.recovery.lost("SIGKILL")
        if failure is None:
            self.tick()
            self.tick()
        return failure


def test_another_engine_takes_the_ports_and_the_weights_of_the_lost_one() -> None:
    cell = Cell()
    assert cell.recovery.lost("SIGKILL") is None
    assert cell.tick() is None
    assert cell.process.take() == ["kill", (1, PORTS, "seventh")]
    assert cell.tick(1.0) is None
    assert cell.recovery.is_under_way
    assert cell.num_back == 0

    cell.process.calls["start"] = True, "engine"
    assert cell.tick() is None

    assert cell.process.take() == ["run engine"]
    assert cell.num_back == 1
    assert not cell.recovery.is_under_way


def test_an_engine_that_is_lost_while_rays_head_is_away_is_started_when_it_is_back() -> None:
    cell = Cell()
    cell.process.is_head_away = True
    cell.recovery.lost("SIGKILL")
    assert cell.tick(LIMIT_SECONDS / 2) is None
    assert cell.process.take() == ["kill"]

    cell.process.is_head_away = False
    cell.tick()

    assert cell.process.take() == [(1, PORTS, "seventh")]


def test_a_start_that_fails_is_tried_again_until_the_limit_and_then_named() -> None:
    cell = Cell()
    cell.recovery.lost("SIGKILL")
    cell.process.calls["start"] = False, "port 61002 cannot be bound"
    cell.tick()
    cell.tick()
    assert cell.process.take() == ["kill", (1, PORTS, "seventh"), "kill"]
    cell.tick(RETRY_SECONDS / 2)
    assert cell.process.take() == []
    cell.tick(RETRY_SECONDS / 2)
    assert cell.process.take() == [(1, PORTS, "seventh")]
    cell.tick()
    failure = cell.tick(LIMIT_SECONDS)
    assert failure is not None
    assert "not back within 30 s (--recovery-limit): port 61002 cannot be bound" in failure


def test_an_engine_without_a_sign_of_life_is_killed_and_another_takes_its_place() -> None:
    cell = Cell()
    cell.tick(PULSE_SECONDS)
    assert cell.process.take() == ["pulse"]
    for _ in range(MIN_LOOKS):
        assert cell.tick(HANG_SECONDS / MIN_LOOKS) is None
    assert cell.process.take() == ["kill"]
    assert cell.recovery.is_under_way
    cell.tick()
    assert cell.process.take() == [(1, PORTS, "seventh")]
    (reason,) = cell.process.lost_reasons
    assert reason == "it hung and was killed by this server: no sign of life for 15 s"


def test_the_next_engine_is_asked_for_a_pulse_of_its_own() -> None:
    cell = Cell()
    cell.tick(PULSE_SECONDS)
    cell.lose_and_start()
    cell.process.take()
    for _ in range(MIN_LOOKS):
        cell.tick(PULSE_SECONDS / MIN_LOOKS)
    assert cell.process.take() == ["pulse"]
    for _ in range(MIN_LOOKS - 1):
        cell.tick(HANG_SECONDS / MIN_LOOKS)
    assert cell.process.take() == []


def test_engines_that_end_one_after_the_other_end_the_cell_and_those_that_lived_long_do_not() -> (
    None
):
    cell = Cell()
    for _ in range(MAX_IN_A_ROW):
        cell.now += STEADY_SECONDS
        assert cell.lose_and_start() is None
    for _ in range(MAX_IN_A_ROW - 1):
        assert cell.lose_and_start() is None
    failure = cell.lose_and_start()
    assert failure is not None
    assert f"the engine ended {MAX_IN_A_ROW + 1} times" in failure
    assert "SIGKILL" in failure


def test_engines_that_hang_from_their_start_on_end_the_cell_too() -> None:
    cell = Cell()
    failure = None
    cell.process.calls["start"] = True, "engine"
    for _ in range(MAX_IN_A_ROW + 1):
        assert failure is None
        cell.tick(PULSE_SECONDS)
        for _ in range(MIN_LOOKS):
            failure = cell.tick(HANG_SECONDS / MIN_LOOKS)
        cell.tick()
        cell.tick()
    assert failure is not None
    assert f"the engine ended {MAX_IN_A_ROW + 1} times" in failure
    assert "it hung" in failure


def test_engines_that_hang_after_a_long_life_do_not() -> None:
    cell = Cell()
    cell.process.calls["start"] = True, "engine"
    for _ in range(MAX_IN_A_ROW + 2):
        cell.process.calls["pulse"] = True, True
        for _ in range(int(STEADY_SECONDS / PULSE_SECONDS) + 1):
            assert cell.tick(PULSE_SECONDS) is None
            assert cell.tick() is None
        cell.process.calls["pulse"] = False, None
        cell.tick(PULSE_SECONDS)
        for _ in range(MIN_LOOKS):
            assert cell.tick(HANG_SECONDS / MIN_LOOKS) is None
        assert cell.recovery.is_under_way
        cell.tick()
        cell.tick()
