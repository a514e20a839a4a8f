"""Raw HTTP/1.1 (raw_cases.py): every case at the listener as stated, however its bytes arrive, and beside uvicorn with
h11, a second server with another parser."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from tests.serve.raw_cases import Case, Recorder, fault, outcome, sent, table
from tests.serve.test_listener import serving, under_uvicorn

CASES = table()
REPRESENTATIVE = (
    "2.2 bare LF ends a header", "2.2 a space before Transfer-Encoding as the first header", "2.3 HTTP/1.0 with a body",
    "3.2.2 absolute-form http://other/a", "3.2 two Hosts", "3.2.3 CONNECT with a body",
    "5.1 Transfer-Encoding and a tab beside Content-Length", "6.1 chunked and Content-Length before",
    "6.1 coding gzip and then chunked", "6.2 Content-Length '3' and '4'", "6.3 a body that is a request",
    "7.1 the size b'10000000000000003'", "7.1 bare LF at the end", "7.1.2 a trailer with a request line",
    "9.3.2 fifty bodies", "9.3.2 a word behind five requests", "9.6 close and another body",
    "9110-7.8 h2c with two bodies", "9110-7.8 h2c behind 120 headers with a body",
    "9110-7.8 h2c with chunks and a trailer",
    "9110-6.6.1 Date",
)  # fmt: skip
AUTHORITY = re.compile(r"^(\w+) https?://[^/?]+/?", re.IGNORECASE)


def at_once(case: Case) -> list[bytes]:
    return [sent(case)]


def bytewise(case: Case) -> list[bytes]:
    data, size = sent(case), 1 if len(case.data) < 2000 else 999
    return [data[start : start + size] for start in range(0, len(data), size)]


def at_random(case: Case) -> list[bytes]:
    """... or around a line's end, where a parser may lose its place."""
    data, chance = sent(case), random.Random(case.id)
    cuts = {chance.randrange(len(data)) for _ in range(3)}
    ends = [match.start() + chance.randrange(5) for match in re.finditer(rb"\r\n", data[:5000])]
    cuts |= set(chance.sample(ends, min(4, len(ends))))
    places = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@contextmanager
def listener() -> Iterator[int]:
    with serving(Recorder(), header_seconds=2) as port:
        yield port


def test_the_table_covers_the_sections_of_rfc_9112() -> None:
    sections = {case.section for case in CASES}
    assert sections >= {"2.2", "2.3", "3", "3.1", "3.2", "3.2.1", "3.2.2", "3.2.3", "3.2.4", "5", "5.1", "5.2", "6.1"}
    assert sections >= {"6.2", "6.3", "7.1", "7.1.1", "7.1.2", "8", "9.3", "9.3.2", "9.6", "9110-7.8", "9110-10.1.1"}
    assert len({case.id for case in CASES}) == len(CASES) > 500


def test_representative_raw_requests_are_handled_as_stated() -> None:
    chosen = [case for case in CASES if case.id in REPRESENTATIVE]
    assert len(chosen) == len(REPRESENTATIVE)
    with listener() as port:
        assert not {case.id: found for case in chosen if (found := fault(case, outcome(port, case), exact=True))}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [at_once, bytewise, at_random])
def test_raw_requests_are_handled_as_stated(cut: Callable[[Case], list[bytes]]) -> None:
    with listener() as port:
        found = {case.id: fault(case, outcome(port, case, cut(case), seconds=20), exact=True) for case in CASES}
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.slow
def test_two_parsers_find_the_same_requests() -> None:
    """Both may refuse, at different requests; what both execute is the same."""
    differences = {}
    with listener() as ours, under_uvicorn(Recorder(), http="h11", ws="none", log_level="critical") as theirs:
        for case in CASES:
            mine = outcome(ours, case, seconds=20).executed
            other = [AUTHORITY.sub(r"\1 /", each) for each in outcome(theirs, case, seconds=3).executed]
            both = min(len(mine), len(other))
            if list(mine[:both]) != other[:both]:
                differences[case.id] = mine, other
    assert not differences
