"""The picture: drawn from whatever there is, even if that is little."""

from __future__ import annotations

import pytest

from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.loadgen.plot import draw
from ratoon.benchmarks.loadgen.run import Round

pytest.importorskip("matplotlib")

GOOD = RequestRecord(
    session=0, turn=0, scheduled=0.0, ended=9.0, chunk_times=[0.5, 8.5], chunk_tokens=[1, 1], num_output_tokens=2
)
FAILED = RequestRecord(session=1, turn=0, scheduled=0.0, ended=0.1, error_kind="timeout")
UNFINISHED = RequestRecord(session=2, turn=0, scheduled=0.0, chunk_times=[0.5], chunk_tokens=[1])


@pytest.mark.slow  # matplotlib
@pytest.mark.parametrize("records", [[], [FAILED], [UNFINISHED], [GOOD, FAILED, UNFINISHED]])
@pytest.mark.parametrize("limits", [{}, {"ttft": 100.0, "e2e": 1e5}])
@pytest.mark.one_in(3)
def test_a_picture_is_drawn_of_good_bad_and_no_requests(tmp_path, records, limits):
    path = tmp_path / "out.svg"
    draw(str(path), "a title", [Round(records, 10.0)] * 2, limits)
    assert "</svg>" in path.read_text()
