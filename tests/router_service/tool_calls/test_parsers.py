"""What each format's parser makes of what models write, well or badly; the same for any division into pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.said import Said, joined
from router_service.tool_calls.call_format import CallFormat
from router_service.tool_calls.deepseek import DEEPSEEK
from router_service.tool_calls.hermes import HERMES
from router_service.tool_calls.mistral import MISTRAL
from tests.router_service.tool_calls.reading import (
    NAMES,
    Offered,
    calls,
    cut,
    make_parser,
    read,
    told,
)

ARGUMENTS = '{"q": "a </tool_call> } ] \\" \\\\", "n": [1, {"x": null}], "u": "é🙂"}'


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def v3(arguments: str, name: str = "f") -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(arguments: str, name: str = "f") -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def deepseek(*written: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def listed(*arguments: str) -> str:
    items = [f'{{"name": "f", "arguments": {a}, "id": "abcdefghi"}}' for a in arguments]
    return f"[TOOL_CALLS] [{', '.join(items)}]"


def named(arguments: str, name: str = "f") -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


ONE_CALL: list[tuple[CallFormat, str]] = [
    (HERMES, hermes(ARGUMENTS)),
    (HERMES, hermes(ARGUMENTS).replace("\n", "")),
    (HERMES, hermes(ARGUMENTS).removesuffix("\n</tool_call>")),
    (HERMES, hermes(ARGUMENTS).removesuffix("_call>")),
    (DEEPSEEK, deepseek(v3(ARGUMENTS))),
    (DEEPSEEK, deepseek(v31(ARGUMENTS))),
    (DEEPSEEK, deepseek(v31(ARGUMENTS)).removesuffix("<｜tool▁calls▁end｜>")),
    (DEEPSEEK, deepseek(v3(ARGUMENTS)).removesuffix("<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    (MISTRAL, listed(ARGUMENTS)),
    (MISTRAL, listed(ARGUMENTS).removesuffix("]")),
    (MISTRAL, named(ARGUMENTS)),
    (MISTRAL, named(ARGUMENTS).replace("[ARGS]", "")),
    (MISTRAL, named(ARGUMENTS).replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]")),
]
TWO_CALLS: list[tuple[CallFormat, str]] = [
    (HERMES, hermes('{"a": 1}') + "\n" + hermes("{}", "get_weather")),
    (DEEPSEEK, deepseek(v3('{"a": 1}'), "\n", v3("{}", "get_weather"))),
    (DEEPSEEK, deepseek(v31('{"a": 1}'), v31("{}", "get_weather"))),
    (MISTRAL, listed('{"a": 1}', "{}").replace('[{"name": "f"', '[{"name": "f"')),
    (MISTRAL, named('{"a": 1}') + named("{}", "get_weather")),
]
NO_CALL: list[tuple[CallFormat, str]] = [
    *(
        (HERMES, text)
        for text in [
            "<tool_call> is the tag for calls, and {this} is not one.",
            "a < b, <tool_calls> and <tool_cal",
            hermes("{oops}"),
            hermes("{").removesuffix("}\n</tool_call>"),
            hermes("[1]"),
            hermes('"text"'),
            hermes("{}", "no_such_tool"),
            hermes("{}").replace('"name"', '"function"'),
            "<tool_call>\n[" + '{"name": "f"}' + "]</tool_call>",
        ]
    ),
    *(
        (DEEPSEEK, text)
        for text in [
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>Well,",
            deepseek(v3("{oops}")),
            deepseek(v31("{}", "no_such_tool")),
            deepseek(v3('{"a": 1}').replace("```json", "")),
            deepseek(v31('{"a": 1}'))[:-60],
        ]
    ),
    *(
        (MISTRAL, text)
        for text in [
            "[TOOL_CALLS] are made so: [ARGS]",
            "[TOOL_CALLS] []",
            "[TOOL_CALLS][1, 2]",
            listed("{'a': 1}"),
            named("{}", "no_such_tool"),
            named("[1]"),
            "[TOOL_CAL",
        ]
    ),
]

CUT: list[tuple[CallFormat, str, str]] = [
    (HERMES, hermes('{"a": oops}'), '{"a": '),
    (HERMES, hermes('{"a": 1').removesuffix("}\n</tool_call>"), '{"a": 1'),
    (HERMES, hermes('{"a": "\\ud83d"}'), '{"a": "\\ud83d'),
    (HERMES, hermes('{"a": "b\nc"}'), '{"a": "b'),
    (HERMES, hermes('{"a": 01}'), '{"a": 0'),
    (DEEPSEEK, deepseek(v3('{"a": {"b": "')).partition("\n```<")[0], '{"a": {"b": "'),
    (DEEPSEEK, deepseek(v31('{"a": [1,]}')), '{"a": [1,'),
    (MISTRAL, listed('{"a": tru').partition(', "id"')[0], '{"a": tru'),
    (MISTRAL, named('{"a": [1, 2'), '{"a": [1, 2'),
]
"""What is told of the arguments. All else behind them is content."""


@pytest.mark.parametrize(("form", "text"), ONE_CALL)
def test_a_call_has_its_name_and_the_arguments_as_they_were_written(
    form: CallFormat, text: str
) -> None:
    said = read(form, [text])
    assert calls(said) == [("f", ARGUMENTS)]
    assert said.text == ""


@pytest.mark.parametrize(("form", "text"), TWO_CALLS)
def test_several_calls_come_in_order_one_without_arguments(form: CallFormat, text: str) -> None:
    said = read(form, [text])
    assert [arguments for _, arguments in calls(said)] == ['{"a": 1}', "{}"]
    assert [call.id for call in said.tool_calls] == ["0", "1"]
    assert said.text == ""


@pytest.mark.parametrize(("form", "text"), NO_CALL)
def test_what_is_no_complete_call_of_an_offered_tool_is_text(form: CallFormat, text: str) -> None:
    assert read(form, [text]) == Said(text=text)


@pytest.mark.parametrize(("form", "text", "arguments"), CUT)
def test_arguments_that_break_off_are_a_call_without_an_end_and_the_rest_is_text(
    form: CallFormat, text: str, arguments: str
) -> None:
    said = read(form, [text])
    (call,) = said.tool_calls
    assert (call.name, call.arguments, call.is_whole) == ("f", arguments, False)
    assert said.text == text[text.index(arguments) + len(arguments) :]
    assert make_parser(form).num_calls == 0


@pytest.mark.parametrize(("form", "text", "arguments"), CUT)
def test_of_a_checked_function_a_call_that_breaks_off_is_text(
    form: CallFormat, text: str, arguments: str
) -> None:
    assert read(form, [text], offered=Offered(checked="f")) == Said(text=text)


@pytest.mark.parametrize(("form", "text"), [*ONE_CALL, *TWO_CALLS])
def test_calls_of_checked_functions_are_those_of_others_and_come_in_one_piece(
    form: CallFormat, text: str
) -> None:
    pieces = told(form, list(text), offered=Offered(checked=NAMES))
    assert joined(pieces) == read(form, [text])
    assert all(part.head and part.ends for said in pieces for part in said.calls)


def test_what_does_not_close_as_the_format_has_it_leaves_a_call_that_has_ended() -> None:
    said = read(HERMES, [hermes("{}").replace("</tool_call>", "<tool_call>")])
    assert calls(said) == [("f", "{}")]
    assert said.text == "}\n<tool_call>"


@pytest.mark.parametrize(("form", "text"), [*ONE_CALL[:2], *ONE_CALL[4:6], *ONE_CALL[8:11:2]])
def test_text_before_and_after_a_call_is_kept_without_the_space_next_to_it(
    form: CallFormat, text: str
) -> None:
    said = read(form, ["I look it up. \n\n" + text + "\n Done. "])
    assert calls(said) == [("f", ARGUMENTS)]
    assert said.text == "I look it up.\n Done. "


@pytest.mark.parametrize(("form", "text"), ONE_CALL[:1] + ONE_CALL[4:5] + ONE_CALL[8:9])
def test_a_call_behind_a_broken_one_is_found(form: CallFormat, text: str) -> None:
    said = read(form, [form.marker + "{oops " + text])
    assert calls(said) == [("f", ARGUMENTS)]
    assert said.text == form.marker + "{oops"


@pytest.mark.parametrize(("form", "text"), TWO_CALLS)
def test_a_second_call_that_is_cut_off_is_text_and_the_first_one_stays(
    form: CallFormat, text: str
) -> None:
    end = text.rindex("{") + 1 if "{}" in text else len(text)
    said = read(form, [text[:end]])
    assert calls(said) == [("f", '{"a": 1}')]
    assert said.text
    assert text[:end].endswith(said.text)


@pytest.mark.parametrize(("form", "text"), TWO_CALLS)
def test_a_parser_of_one_call_is_full_with_it(form: CallFormat, text: str) -> None:
    parser = make_parser(form, max_calls=1)
    characters = iter(text)
    while not parser.is_full:
        parser.add(next(characters))
    assert parser.num_calls == 1
    assert "{}" in "".join(characters)
    assert calls(read(form, [text], max_calls=1)) == [("f", '{"a": 1}')]


@pytest.mark.parametrize("missing", ["", ', "arguments": null', ', "arguments": "{}"'])
def test_missing_null_and_quoted_arguments_are_objects(missing: str) -> None:
    text = f'<tool_call>{{"name": "f"{missing}}}</tool_call>'
    assert calls(read(HERMES, [text])) == [("f", "{}")]


def test_arguments_that_hold_an_object_as_a_string_are_that_object() -> None:
    assert calls(read(HERMES, [hermes('"{\\"a\\": \\"é\\"}"')])) == [("f", '{"a": "é"}')]


def test_deeply_nested_arguments_are_read_or_are_text() -> None:
    text = hermes('{"a": ' + "[" * 5000 + "]" * 5000 + "}")
    said = read(HERMES, [text])
    (call,) = said.tool_calls
    assert not call.is_whole
    assert call.arguments + said.text == text[text.index('{"a"') :]


def test_text_that_cannot_become_a_call_is_told_at_once() -> None:
    parser = make_parser(HERMES)
    assert [parser.add(piece).text for piece in ["Hi", " <", "b", " <tool_", "kit>"]] == [
        "Hi",
        "",
        " <b",
        "",
        " <tool_kit>",
    ]
    assert parser.add("<tool_call> is").text == "<tool_call> is"


@pytest.mark.parametrize(("form", "text"), [ONE_CALL[0], ONE_CALL[4], ONE_CALL[8], ONE_CALL[10]])
def test_arguments_are_told_character_by_character_behind_their_name(
    form: CallFormat, text: str
) -> None:
    parts = [said.calls for said in told(form, list(text)) if said.calls]
    assert all(len(part) == 1 for part in parts[1:])
    assert parts[0][0].head is not None
    assert parts[0][0].head.name == "f"
    assert all(part.head is None for (part,) in parts[1:])
    assert max(len(part.arguments) for (part,) in parts[1:]) == 1
    assert [part.ends for (part,) in parts[1:]] == [False] * (len(parts) - 2) + [True]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        '<tool_call>{"id": 5, "name": "f", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
    ],
)
def test_arguments_that_do_not_follow_their_name_as_an_object_come_in_one_piece(text: str) -> None:
    pieces = told(HERMES, list(text))
    (part,) = [part for said in pieces for part in said.calls]
    assert part.head is not None
    assert json.loads(part.arguments) == {"a": 1}
    assert joined(pieces) == read(HERMES, [text])


ALL_TEXTS = [*ONE_CALL, *TWO_CALLS, *NO_CALL, *((form, text) for form, text, _ in CUT)]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize(("form", "text"), ALL_TEXTS)
def test_pieces_of_any_width_say_what_the_whole_says(
    form: CallFormat, text: str, width: int
) -> None:
    around = f"Before {text}\n{text} after "
    pieces = [around[start : start + width] for start in range(0, len(around), width)]
    assert read(form, pieces) == read(form, [around])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", '"', "\\",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n",
    "```", "<｜tool▁call▁end｜>", " ", "\n", "f", ", ", "é🙂", '{"name": "f", "arguments": {}}', "{}",
    '{"name": "f"', "function", hermes("{}"), named("{}"), deepseek(v3("{}")), v31("{}"),
]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    form=st.sampled_from([HERMES, DEEPSEEK, MISTRAL]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    places=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_text_in_any_pieces_says_what_the_whole_says(
    form: CallFormat, fragments: list[str], places: list[int]
) -> None:
    text = "".join(fragments)
    assert read(form, cut(text, places)) == read(form, [text])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    form=st.sampled_from([HERMES, DEEPSEEK, MISTRAL]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
)
def test_nothing_is_lost_where_there_is_no_call(form: CallFormat, fragments: list[str]) -> None:
    text = "".join(fragments)
    said = read(form, [text])
    assert said.calls or said.text == text


STYLES = {
    "hermes": (HERMES, hermes),
    "deepseek v3": (DEEPSEEK, lambda arguments: deepseek(v3(arguments))),
    "deepseek v3.1": (DEEPSEEK, lambda arguments: deepseek(v31(arguments))),
    "mistral list": (MISTRAL, listed),
    "mistral args": (MISTRAL, named),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    style=st.sampled_from(sorted(STYLES)),
    arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    written=st.booleans(),
    places=st.lists(st.integers(0, 400), max_size=12),
    end=st.integers(0, 400),
)
def test_streamed_arguments_of_any_value_in_any_pieces_are_those_of_the_whole(
    style: str, arguments: dict[str, object], written: bool, places: list[int], end: int
) -> None:
    """Complete, and cut off anywhere."""
    form, make = STYLES[style]
    text = make(json.dumps(arguments, ensure_ascii=written, indent=1 if written else None))
    said = read(form, cut(text, places))
    assert said == read(form, [text])
    assert [json.loads(written) for _, written in calls(said)] == [arguments]
    shorter = text[: end % (len(text) + 1)]
    assert read(form, cut(shorter, places)) == read(form, [shorter])
    for call in read(form, [shorter]).tool_calls:
        assert said.tool_calls[0].arguments.startswith(call.arguments)
