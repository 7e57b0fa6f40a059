"""The table of results, as a part of a document that people also write in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.report import RESULTS_BEGIN, RESULTS_END, with_results

HEADER = ("| client | version | result | seconds | checked |", "| --- | --- | --- | --- | --- |")
Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Result:
    """remarks: why it failed or was not run, and what was left out."""

    client: str
    version: str
    verdict: Verdict
    seconds: float
    checked: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def row(self) -> str:
        checked = "; ".join([*self.checked, *(f"**{remark}**" for remark in self.remarks)])
        seconds = "" if self.verdict == "not run" else f"{self.seconds:.0f}"
        cells = (self.client, self.version, self.verdict, seconds, checked)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def with_table(document: str, results: Sequence[Result], names: Sequence[str], told: str) -> str:
    """The document with the rows of `results`; rows of other clients in `names` stay as they were.

    names: in the order of the table; told: a sentence about the run. Raises ValueError when the document has no place.
    """
    rows = _rows_of(document) | {result.client: result.row for result in results}
    table = "\n".join([*HEADER, *(rows[name] for name in names if name in rows)])
    return with_results(document, f"{told}\n\n{table}")


def _rows_of(document: str) -> dict[str, str]:
    _, _, rest = document.partition(RESULTS_BEGIN)
    lines = rest.partition(RESULTS_END)[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and line not in HEADER]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}
