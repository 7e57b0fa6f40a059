"""Objects of /v1/responses: what is the same whether an answer is told whole or as events. Pure."""

from typing import Any, Literal

from router_service.choice_delta import ChoiceEnd
from router_service.generation import Generation
from router_service.logprobs import ScoredToken, chat_logprobs
from router_service.responses_api.body import ResponsesBody
from router_service.tokenizer import TextCodec

Json = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def response_object(
    generation: Generation,
    body: ResponsesBody,
    *,
    output: list[Json],
    weight_version: str,
    end: ChoiceEnd | None,
    error: Json | None = None,
) -> Json:
    """end: None while it is generated, or when it has failed with `error`."""
    sampling = generation.request.sampling[0]
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": _status(end) if error is None else "failed",
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if _is_cut(end) else None,
        "instructions": body.instructions,
        "model": generation.model,
        "weight_version": weight_version,
        "output": output,
        "usage": None if end is None else _usage(generation, end),
        "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": True,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "metadata": {},
    }


def message_item(generation: Generation, status: ItemStatus, content: list[Json]) -> Json:
    return {
        "id": item_id(generation),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def item_id(generation: Generation) -> str:
    return f"msg_{generation.token}"


def text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def token_logprobs(
    generation: Generation, scored: list[ScoredToken], codec: TextCodec
) -> list[Json]:
    """Empty unless they were asked for."""
    num_logprobs = generation.request.num_logprobs
    if num_logprobs is None:
        return []
    entries: list[Json] = chat_logprobs(scored, codec, with_top=num_logprobs > 0)["content"]
    return entries


def item_status(end: ChoiceEnd) -> ItemStatus:
    return "incomplete" if _is_cut(end) else "completed"


def _is_cut(end: ChoiceEnd | None) -> bool:
    return end is not None and end.finish_reason == "length"


def _status(end: ChoiceEnd | None) -> ItemStatus:
    return "in_progress" if end is None else item_status(end)


def _tool_choice(body: ResponsesBody) -> Any:
    if body.tool_choice is None:
        return "auto"
    choice = body.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump()


def _usage(generation: Generation, end: ChoiceEnd) -> Json:
    num_prompt_tokens = generation.num_prompt_tokens
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": end.cached_tokens,
            "replayed_tokens": end.replayed_tokens,
        },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + end.completion_tokens,
    }
