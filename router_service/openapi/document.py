"""The OpenAPI 3.1 document of the API port, made of the models that bodies are checked with. Pure."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router_service.openapi.answers import NotReady
from router_service.openapi.operations import OPERATIONS, Body, Operation
from router_service.protocol import ChatBody

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_ERRORS = {
    "400": "A field or a value that is not served; the message names it",
    "404": "Another model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "The queue is full; Retry-After says when to come again",
    "503": "The cell cannot run steps",
}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event."""
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_document(version: str, model: str, *, with_keys: bool) -> Json:
    """model: the name of the served one; with_keys: requests need a key."""
    models = _Models(model)
    paths: Json = {}
    for operation in OPERATIONS:
        described = _operation(operation, models)
        if with_keys and operation.needs_key:
            described["security"] = [{name: []} for name in _KEY_SCHEMES]
            described["responses"]["401"] = _answer("The key is wrong", models, operation.error)
        paths.setdefault(operation.path, {})[operation.method] = described
    components: Json = {"schemas": models.definitions}
    if with_keys:
        components["securitySchemes"] = _KEY_SCHEMES
    return {
        "openapi": "3.1.0",
        "info": {"title": "pointsman", "version": version},
        "paths": paths,
        "components": components,
    }


class _Models:
    """Schemas of all models that operations name, by one pydantic call, so that equal names do not clash."""

    def __init__(self, model_name: str) -> None:
        self.name = {"enum": [model_name]}
        asked: list[type[BaseModel]] = [ChatBody, NotReady]
        for operation in OPERATIONS:
            asked += [operation.error, *(body.own for body in operation.bodies)]
            asked += [operation.answer] if operation.answer is not None else []
        references, top = models_json_schema(
            [(model, "validation") for model in dict.fromkeys(asked)],
            ref_template=_SCHEMAS + "{model}",
        )
        self._references = {model: schema for (model, _), schema in references.items()}
        self.definitions: Json = top["$defs"]
        owns: list[type[BaseModel]] = [body.own for o in OPERATIONS for body in o.bodies]
        for own in owns:
            fields = self.of(own)["properties"]
            if "model" in fields:
                fields["model"] = self._model_field(fields["model"])

    def reference(self, model: type[BaseModel]) -> Json:
        return dict(self._references[model])

    def _model_field(self, schema: Json) -> Json:
        """The name, or null where the model may be absent."""
        return {"enum": [*self.name["enum"], None]} if "anyOf" in schema else self.name

    def of(self, model: type[BaseModel]) -> Json:
        """The schema itself."""
        name = self._references[model]["$ref"].removeprefix(_SCHEMAS)
        schema: Json = self.definitions[name]
        return schema

    def body(self, body: Body) -> Json:
        """Own fields and the chat's in one object."""
        if not body.the_chats:
            return self.reference(body.own)
        own, chat = self.of(body.own), self.of(ChatBody)
        passed = {name: chat["properties"][name] for name in body.the_chats}
        required = [name for name in chat["required"] if name in passed]
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {**own["properties"], **passed},
            "required": [*own.get("required", ()), *required],
        }


def _operation(operation: Operation, models: _Models) -> Json:
    name = f"{operation.method}{operation.path}".replace("/", "_").replace("{", "").replace("}", "")
    described: Json = {"operationId": name, "summary": operation.summary}
    if "{model}" in operation.path:
        text = {"type": "string", "minLength": 1}
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": text}
        ]
    if operation.method == "post":
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body(operation, models)}},
        }
    described["responses"] = _responses(operation, models)
    return described


def _body(operation: Operation, models: _Models) -> Json:
    schemas = [models.body(body) for body in operation.bodies]
    if not schemas:
        return {"type": "object"}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _responses(operation: Operation, models: _Models) -> Json:
    responses: Json = {} if operation.refuses else {"200": _success(operation, models)}
    if operation.path == "/health":
        responses["503"] = _answer("No step can run; Retry-After", models, NotReady)
    elif operation.method == "post":
        for status, meaning in _ERRORS.items():
            responses[status] = _answer(meaning, models, operation.error)
    elif operation.needs_key:
        responses["404"] = _answer("Another model", models, operation.error)
    elif operation.answer is None:
        responses["503"] = _answer("The engine does not answer", models, operation.error)
    return responses


def _success(operation: Operation, models: _Models) -> Json:
    if operation.answer is None:
        return {"description": "Text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    answer = _answer("Done", models, operation.answer)
    if operation.streams:
        answer["content"]["text/event-stream"] = {"schema": _EVENT}
    return answer


def _answer(meaning: str, models: _Models, model: type[BaseModel]) -> Json:
    content = {"application/json": {"schema": models.reference(model)}}
    return {"description": meaning, "content": content}
