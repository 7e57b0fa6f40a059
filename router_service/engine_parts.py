"""The collaborators that the engine's loop calls."""

from dataclasses import dataclass

from router_service.clients import PrefixStore, Workers
from router_service.features import Features
from router_service.plans import Plans
from router_service.scheduler import Scheduler
from router_service.step_observer import StepObserver


@dataclass(frozen=True)
class EngineParts:
    scheduler: Scheduler
    store: PrefixStore
    workers: Workers
    plans: Plans
    features: Features
    observer: StepObserver
