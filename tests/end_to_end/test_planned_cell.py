"""`pointsman serve` with sixteen ranks on one machine: a chat, and its replay by plans."""

import pytest

from tests.helpers.served import Served
from tests.integration.api import CellApi, random_prompt, source_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
START_SECONDS = 240.0
STOP_SECONDS = 30.0
"""Eighteen actors, perhaps on few cores."""


def test_sixteen_ranks_chat_replay_by_plans_and_stop_cleanly() -> None:
    prompt = random_prompt(16, 64)
    patient = "scheduler.plan_wait_seconds=60"
    with Served("--ep-size", "16", "--deterministic", "--set", patient) as served:
        served.wait_until_ready(START_SECONDS)
        with CellApi(served.base_url, served.admin_url) as api:
            chat = api.http.post(
                f"{api.base_url}/v1/chat/completions",
                json={
                    "model": "minnow",
                    "messages": [{"role": "user", "content": "Hello"}],
                    "max_tokens": 2,
                },
            )
            assert chat.status_code == 200, chat.text
            cold = api.complete(prompt, 2)
            api.evict("kv")
            replayed = api.complete(prompt, 2)
            assert source_of(replayed) == (0, 64)
            assert replayed["choices"][0]["text"] == cold["choices"][0]["text"]
            assert api.metric("replayed_tokens_total", "planned") == 64
            assert api.metric("plan_fragment_misses_total") == 1
        served.interrupt()
        assert served.wait(STOP_SECONDS) == 0
        served.assert_nothing_left(STOP_SECONDS)
