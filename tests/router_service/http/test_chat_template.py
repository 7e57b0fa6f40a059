import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.errors import CheckpointError, RequestError
from router_service.chat_template import ChatTemplate, load_chat_template
from tests.router_service.http.helpers import CODEC, DEMO_MODEL

USER = {"role": "user", "content": "What is the weather in <Paris> & 'Oslo'? 🙂"}
CALL = {"name": "get_weather", "arguments": {"city": "Málaga <>&'"}}
TOOL_TURN = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
}
TOOL_ANSWER = {"role": "tool", "content": "22 °C", "tool_call_id": "call_1"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Sun."}, USER],
    [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
    [USER, TOOL_TURN, TOOL_ANSWER],
    [{"role": "user", "content": "<|im_end|> and <tool_call>"}],
    [{"role": "user", "content": ""}],
]


def make_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_has_the_text_and_ids_that_transformers_gives(
    messages: list[dict[str, Any]], reference: Any
) -> None:
    template = load_chat_template(DEMO_MODEL)
    assert template is not None
    text = template.render(messages)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == expected
    ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert CODEC.encode(text, add_special_tokens=False) == ids


def test_developer_is_system_where_the_template_has_no_such_role() -> None:
    template = make_template("{% for m in messages %}[{{ m.role }}]{% endfor %}")
    assert template.render([{"role": "developer", "content": "x"}]) == "[system]"


def test_developer_stays_where_the_template_knows_it() -> None:
    source = "{% for m in messages %}[{{ 'D' if m.role == 'developer' else 'S' }}]{% endfor %}"
    assert make_template(source).render([{"role": "developer", "content": "x"}]) == "[D]"


def test_raise_exception_becomes_a_request_error() -> None:
    template = make_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([USER])


def test_the_sandbox_keeps_templates_from_python() -> None:
    template = make_template("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        template.render([USER])


def test_blocks_are_trimmed_loops_can_break_and_generation_blocks_show_their_body() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n{% endfor %}"
    )
    assert make_template(source).render([{"role": "user", "content": "<é>"}] * 2) == '<s>"<é>"'


@pytest.mark.parametrize(
    "shown",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ '' + c.function.arguments }}",
        "{{ c.function.arguments if m.content is none }}",
    ],
)
def test_tool_calls_are_given_in_the_form_that_the_template_shows(shown: str) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}: "
        + shown
        + "{% endfor %}{% endfor %}"
    )
    assert "city" in make_template(source).render([USER, TOOL_TURN])


def test_a_template_that_cannot_show_tool_calls_refuses_them() -> None:
    template = make_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="cannot show tool calls"):
        template.render([USER, TOOL_TURN])


def test_a_template_that_does_not_compile_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        make_template("{% for %}")


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ a", "{% if x %}", "{% unknown %}", "{{ x | nofilter }}"]
)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_syntax_error_names_the_file(name: str, source: str, tmp_path: Path) -> None:
    content = source if name.endswith("jinja") else json.dumps({"chat_template": source})
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as refused:
        load_chat_template(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / name}: the chat template does not compile: ")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("wrong", ["a directory", "a dangling link", "not UTF-8"])
def test_a_file_that_cannot_be_read_is_named(name: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / name
    make = {
        "a directory": file.mkdir,
        "a dangling link": lambda: file.symlink_to(tmp_path / "gone"),
        "not UTF-8": lambda: file.write_bytes(b"\xff\xfe{}"),
    }
    make[wrong]()
    with pytest.raises(CheckpointError) as refused:
        load_chat_template(tmp_path)
    assert str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "value", [5, True, {"a": "b"}, ["text"], [{"name": "default", "template": 5}]]
)
def test_a_template_of_the_wrong_type_is_refused_by_file(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is "):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{{ {}['x'].y }}", "{{ messages[9].content }}"])
def test_whatever_a_template_raises_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        make_template(source).render([USER])


def test_the_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([USER]) == "file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}'
    )
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([USER]) == "d"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
