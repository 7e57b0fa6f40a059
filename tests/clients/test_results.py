import pytest

from tests.clients.results import HEADER, Result, with_table

DOCUMENT = "# Clients\n\nby hand\n\n<!-- results -->\n<!-- end of results -->\n\nalso by hand\n"
NAMES = ["one", "two", "three"]


def result(client: str, **fields: object) -> Result:
    given = {"version": "1.2", "verdict": "passed", "seconds": 3.4, "checked": ["chat", "stop"]}
    return Result(client, **(given | fields))  # type: ignore[arg-type]  # a builder with defaults


def table_of(document: str) -> list[str]:
    return [line for line in document.splitlines() if line.startswith("|")]


def test_a_table_has_a_row_for_each_client_in_the_order_of_names() -> None:
    written = with_table(DOCUMENT, [result("two"), result("one")], NAMES, "A sentence.")
    assert table_of(written) == [
        *HEADER,
        "| one | 1.2 | passed | 3 | chat; stop |",
        "| two | 1.2 | passed | 3 | chat; stop |",
    ]


def test_what_people_have_written_stays() -> None:
    written = with_table(DOCUMENT, [result("one")], NAMES, "A sentence.")
    assert written.startswith("# Clients\n\nby hand\n\n<!-- results -->\n\nA sentence.\n\n|")
    assert written.endswith("|\n\n<!-- end of results -->\n\nalso by hand\n")


def test_rows_of_clients_that_were_not_driven_stay() -> None:
    first = with_table(DOCUMENT, [result("one"), result("two")], NAMES, "First.")
    second = with_table(first, [result("two", version="1.3"), result("three")], NAMES, "Second.")
    assert [row.split(" | ")[:2] for row in table_of(second)[2:]] == [
        ["| one", "1.2"],
        ["| two", "1.3"],
        ["| three", "1.2"],
    ]


def test_rows_of_clients_that_are_not_driven_any_more_go() -> None:
    first = with_table(DOCUMENT, [result("one"), result("two")], NAMES, "First.")
    assert [row[:5] for row in table_of(with_table(first, [], ["two"], ""))[2:]] == ["| two"]


def test_what_went_wrong_is_in_the_row_and_a_client_that_was_not_run_took_no_time() -> None:
    failed = result("one", verdict="failed", remarks=["400: NotFoundError | instead"])
    missing = result("two", verdict="not run", checked=[], remarks=["no npm on this machine"])
    assert [failed.row, missing.row] == [
        "| one | 1.2 | failed | 3 | chat; stop; **400: NotFoundError / instead** |",
        "| two | 1.2 | not run |  | **no npm on this machine** |",
    ]


def test_a_document_without_a_place_for_them_is_refused() -> None:
    with pytest.raises(ValueError, match="results"):
        with_table("# Clients\n", [], NAMES, "")
