"""Routes of a response, read and written; arrays that are none."""

import base64
from typing import Any

import numpy as np
import pytest

from cluster.errors import RouteReplayError
from cluster.npy import encode_npy
from expert_workers.route_replay.ranged_routes import (
    RangedRoutes,
    decode_routes,
    encode_routes,
    routes_of_choice,
)


def make_routes(
    num_tokens: int = 5, start: int = 0, *, weights: bool = True, seed: int = 0
) -> RangedRoutes:
    """Of 3 MoE layers, 2 of 300 experts."""
    draw = np.random.default_rng(seed)
    ids = np.sort(
        draw.permuted(np.tile(np.arange(300), (num_tokens, 3, 1)), axis=-1)[..., :2], axis=-1
    ).astype(np.uint16)
    return RangedRoutes(ids, draw.random(ids.shape, np.float32) if weights else None, start)


def answer_with(choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": i, **c} for i, c in enumerate(choices)], **fields}


def as_prompt(*fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of one prompt, or lists of those of several."""
    if len(fields) == 1:
        return {f"prompt_{name}": value for name, value in fields[0].items()}
    return {f"prompt_{name}": [f[name] for f in fields] for name in fields[0]}


def assert_same(routes: RangedRoutes, expected: RangedRoutes) -> None:
    assert (routes.start, routes.end) == (expected.start, expected.end)
    assert routes.topk_ids.dtype == expected.topk_ids.dtype
    np.testing.assert_array_equal(routes.topk_ids, expected.topk_ids)
    assert (routes.topk_weights is None) == (expected.topk_weights is None)
    if routes.topk_weights is not None and expected.topk_weights is not None:
        np.testing.assert_array_equal(routes.topk_weights, expected.topk_weights)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_what_is_encoded_is_decoded(num_tokens: int, weights: bool) -> None:
    routes = make_routes(num_tokens, 7, weights=weights)
    assert_same(decode_routes(encode_routes(routes)), routes)


def test_a_choice_is_found_by_its_index() -> None:
    routes = [make_routes(seed=seed) for seed in range(3)]
    answer = answer_with([encode_routes(one) for one in routes])
    answer["choices"].reverse()
    assert_same(routes_of_choice(answer, 2), routes[2])


def test_the_prompts_routes_stand_before_those_of_each_of_its_choices() -> None:
    prompt, completion = make_routes(4, 2), make_routes(3, 6, seed=1)
    answer = answer_with(
        [encode_routes(make_routes(9, 6)), encode_routes(completion)],
        **as_prompt(encode_routes(prompt)),
    )
    routes = routes_of_choice(answer, 1)
    assert (routes.start, routes.end) == (2, 9)
    np.testing.assert_array_equal(routes.topk_ids[:4], prompt.topk_ids)
    np.testing.assert_array_equal(routes.topk_ids[4:], completion.topk_ids)


def test_choices_of_several_prompts_have_those_of_their_own_prompt() -> None:
    prompts = [make_routes(4, seed=8), make_routes(2, seed=9)]
    starts = [4, 4, 2, 2]
    answer = answer_with(
        [encode_routes(make_routes(3, start)) for start in starts],
        **as_prompt(*(encode_routes(prompt) for prompt in prompts)),
    )
    assert [routes_of_choice(answer, index).end for index in range(4)] == [7, 7, 5, 5]
    np.testing.assert_array_equal(routes_of_choice(answer, 2).topk_ids[:2], prompts[1].topk_ids)


def test_a_part_without_tokens_counts_as_absent() -> None:
    completion = make_routes(3, 9)
    answer = answer_with([encode_routes(completion)], **as_prompt(encode_routes(make_routes(0, 6))))
    assert_same(routes_of_choice(answer), completion)


GOOD = encode_routes(make_routes())
BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no routes": ({"routed_experts": None}, "routed_experts: missing"),
    "a list": ({"routed_experts": [[1]]}, "routed_experts: list"),
    "no base64": ({"routed_experts": "☃"}, "routed_experts: "),
    "base64 of something else": (
        {"routed_experts": base64.b64encode(b"nothing").decode()},
        "routed_experts: ",
    ),
    "an empty text": ({"routed_experts": ""}, "routed_experts: "),
    "weights that are none": ({"routed_weights": "?"}, "routed_weights: "),
    "no range": ({"routed_range": None}, "routed_range: None"),
    "a range of three": ({"routed_range": [0, 5, 5]}, "routed_range: [0, 5, 5]"),
    "a range backwards": ({"routed_range": [5, 0]}, "routed_range: [5, 0]"),
    "a range of other tokens": ({"routed_range": [1, 5]}, "routed_range: [1, 5]"),
    "two dimensions": (
        {"routed_experts": encode_npy(np.zeros((5, 3), np.uint8))},
        "expert ids of shape (5, 3)",
    ),
    "fractions": (
        {"routed_experts": encode_npy(np.zeros((5, 3, 2)))},
        "expert ids of dtype float64",
    ),
    "below 0": (
        {"routed_experts": encode_npy(np.full((5, 3, 2), -1))},
        "expert id -1",
    ),
    "twice the same": (
        {"routed_experts": encode_npy(np.ones((5, 3, 2), np.uint8))},
        "expert ids [1, 1] of token 0 in MoE layer 0",
    ),
    "weights of other tokens": (
        {"routed_weights": encode_npy(np.zeros((4, 3, 2), np.float32))},
        "weights of shape (4, 3, 2)",
    ),
    "weights of another dtype": (
        {"routed_weights": encode_npy(np.zeros((5, 3, 2), np.float16))},
        "weights of dtype float16",
    ),
    "weights without end": (
        {"routed_weights": encode_npy(np.full((5, 3, 2), np.inf, np.float32))},
        "not finite",
    ),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_what_the_api_never_returns_is_refused_by_name(name: str) -> None:
    changed, message = BAD_FIELDS[name]
    with pytest.raises(RouteReplayError) as refused:
        decode_routes(GOOD | changed)
    assert message in str(refused.value)


def test_arrays_of_objects_are_not_unpickled() -> None:
    objects = base64.b64encode(
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
        + b"\n"
        + b"cos\nsystem\n(S'true'\ntR."
    ).decode()
    with pytest.raises(RouteReplayError, match=r"routed_experts: .*allow_pickle"):
        decode_routes(GOOD | {"routed_experts": objects})


def test_a_choice_that_is_not_there_is_refused() -> None:
    with pytest.raises(RouteReplayError, match="choice 1: not in the answer"):
        routes_of_choice(answer_with([GOOD]), 1)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (make_routes(2, 6), "without a gap"),
        (make_routes(2, 5, weights=False), "without cannot be joined"),
        (RangedRoutes(np.zeros((1, 2, 1), np.uint8), np.zeros((1, 2, 1), np.float32), 5), "(2, 1)"),
    ],
)
def test_parts_that_do_not_follow_one_another_are_refused(
    later: RangedRoutes, message: str
) -> None:
    with pytest.raises(RouteReplayError) as refused:
        make_routes(5).followed_by(later)
    assert message in str(refused.value)
