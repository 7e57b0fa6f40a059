"""From a JSON object to a typed body, with one message that names the first field that is wrong."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.errors import RequestError
from router_service.body_fields import UNION_TAGS, Strict
from router_service.json_body import field_path
from router_service.openai_errors import safe_text

_OUR_KINDS = ("unsupported", "field", "field_count", "empty_stop", "empty_word")
"""Errors whose message is ours as it is."""
B = TypeVar("B", bound=Strict)


def validate(model: type[B], body: dict[str, Any]) -> B:
    """The typed body. Raises RequestError with the path of the first field that is wrong."""
    for name in body:
        if name not in model.model_fields:
            field = field_path((name,))
            raise RequestError(f"{field}: this field is not supported", field=field)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0], body) from error


def _request_error(details: ErrorDetails, body: dict[str, Any]) -> RequestError:
    location = details["loc"]
    context = details.get("ctx", {})
    if details["type"] == "field":
        location = (*location, context["field"])
    if details["type"] in ("union_tag_not_found", "union_tag_invalid"):
        location = (*location, context["discriminator"].strip("'"))
    field = field_path(_real_path(location, body))
    return RequestError(f"{field}: {_message(details)}", field=field)


def _real_path(location: tuple[str | int, ...], body: Any) -> tuple[str | int, ...]:
    """Location without the tags that pydantic adds for members of a union, which are not in the body."""
    path: list[str | int] = []
    value: Any = body
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if _holds(value, part):
            value = value[part]
        elif part in UNION_TAGS or not (is_last and isinstance(value, dict)):
            continue
        path.append(part)
    return tuple(path)


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int)
    return isinstance(value, dict) and part in value


def _message(details: ErrorDetails) -> str:
    kind, given = details["type"], safe_text(details["input"])
    context = details.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return "this field is required"
    if kind == "extra_forbidden":
        return "this field is not supported"
    if kind == "literal_error":
        return f"is {given}; supported: {context['expected']}"
    if kind == "union_tag_invalid":
        return (
            f"{safe_text(context['tag'])} is not supported; supported: {context['expected_tags']}"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be an object, got {given}"
    if kind in _OUR_KINDS:
        return details["msg"]
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {given}"
