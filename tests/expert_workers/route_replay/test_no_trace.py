"""A replay or a recording that is over has left the model as it was."""

from typing import Any

import pytest
import torch

from cluster.errors import RouteReplayError
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import replay_routes
from tests.expert_workers.route_replay.three_sequences import (
    IDS,
    LAYOUT,
    MASK,
    WEIGHTS,
    WHOLE_IDS,
    WHOLE_MASK,
    checkpoint,
    moved,
    own_routes,
)
from tests.helpers.trainers import (
    FAMILIES,
    tiny_trainer,
    token_logprobs,
)


def traces(model: Any) -> dict[str, Any]:
    """All that a module can be found out by: what it holds, its hooks, its methods, its weights."""
    held = {name: sorted(vars(module)) for name, module in model.named_modules()}
    hooks = {
        (name, kind): dict(value)
        for name, module in model.named_modules()
        for kind, value in vars(module).items()
        if "hooks" in kind and isinstance(value, dict)
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK, use_cache=False).logits
    return {"held": held, "hooks": hooks, "weights": weights, "logits": logits}


def assert_no_trace(model: Any, before: dict[str, Any]) -> None:
    after = traces(model)
    assert after["held"] == before["held"]
    assert after["hooks"] == before["hooks"]
    assert list(after["weights"]) == list(before["weights"])
    for name, tensor in after["weights"].items():
        assert torch.equal(tensor, before["weights"][name])
    assert torch.equal(after["logits"], before["logits"])


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_and_recording_leave_no_trace(family: str) -> None:
    model = tiny_trainer(family)
    checkpoint(model, reentrant=False)
    before = traces(model)
    routes = own_routes(moved(model, share=0.3))
    for topk_weights in WEIGHTS:
        with replay_routes(model, LAYOUT, routes, topk_weights=topk_weights):
            own_routes(model)
    assert_no_trace(model, before)


def test_an_exception_leaves_no_trace_either() -> None:
    model = tiny_trainer("olmoe")
    before, routes = traces(model), own_routes(model)
    with (
        pytest.raises(KeyError, match="of the loop"),
        replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
        record_routes(model),
    ):
        raise KeyError("of the loop")
    with (
        pytest.raises(RouteReplayError, match="a pass over 37 tokens inside the replay"),
        replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
    ):
        token_logprobs(model, WHOLE_IDS, WHOLE_MASK)
    assert_no_trace(model, before)
