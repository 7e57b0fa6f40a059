"""Features switched off and on again over the admin port, under requests that stream."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.served import eventually
from tests.integration.api import ALL_ON, CellApi, random_prompt, source_of

pytestmark = pytest.mark.ray
MAX_TOKENS = 24


def stream_text(api: CellApi, prompt: list[int]) -> str:
    return "".join(piece["text"] for piece in api.stream(prompt, MAX_TOKENS))


@pytest.mark.parametrize("name", ALL_ON)
def test_streams_have_the_same_text_while_a_feature_goes_off_and_on(
    switching: CellApi, name: str
) -> None:
    api = switching
    prefix = random_prompt(31, 160)
    prompts = [prefix + random_prompt(300 + n, 8 + n) for n in range(4)]
    alone = [api.complete(prompt, MAX_TOKENS)["choices"][0]["text"] for prompt in prompts]
    api.evict("kv")
    generated = "generation_tokens_total"
    before = api.metric(generated)
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(stream_text, api, prompt) for prompt in prompts]
        eventually(lambda: api.metric(generated) > before, 30.0, "a first token")
        for state in (False, True, False, True):
            assert api.features(**{name: state}) == ALL_ON | {name: state}
            assert api.status()["features"][name] is state
        api.features(**{name: False})
        late = [pool.submit(stream_text, api, prompt) for prompt in prompts]
        assert [stream.result() for stream in streams] == alone
        assert [stream.result() for stream in late] == alone
    api.features(**{name: True})
    assert stream_text(api, prompts[0]) == alone[0]


def test_with_the_store_off_a_known_prompt_is_computed_again(switching: CellApi) -> None:
    api, prompt = switching, random_prompt(32, 100)
    api.complete(prompt)
    nodes = api.status()["store_nodes"]
    api.features(prefix_store=False)
    assert source_of(api.complete(prompt)) == (0, 0)
    assert api.status()["store_nodes"] == nodes
    api.features(prefix_store=True)
    assert source_of(api.complete(prompt)) == (96, 0)


def test_replay_and_plans_are_off_for_those_who_come_then(switching: CellApi) -> None:
    api, prompt = switching, random_prompt(33, 100)
    api.complete(prompt)
    replayed = []
    for states in ({"route_replay": False}, {"planned_dispatch": False}, {}):
        api.features(**ALL_ON)
        api.features(**states)
        api.evict("kv")
        before = api.metrics()
        api.complete(prompt)
        after = api.metrics()
        keys = [("pointsman_replayed_tokens_total", (way,)) for way in ("negotiated", "planned")]
        replayed.append([after[key] - before[key] for key in keys])
    assert replayed == [[0, 0], [96, 0], [0, 96]]
