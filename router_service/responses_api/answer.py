"""The object of /v1/responses, the same whether an answer is told whole or as events. Pure."""

from typing import Any

from router_service.choice_delta import ChoiceEnd
from router_service.generation import Generation
from router_service.responses_api.body import ResponsesBody
from router_service.responses_api.items import ItemStatus

Json = dict[str, Any]


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
        "tools": [dict(tool) for tool in body.tools or ()],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "metadata": {},
    }


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
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": num_prompt_tokens + end.completion_tokens,
    }
