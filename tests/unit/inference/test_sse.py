from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.inference.sse import SseParser

EVENTS = [b'{"a":1}', b"[DONE]", "café 海".encode(), b"two\nlines"]


def encoded(ending: bytes) -> bytes:
    lines = [b": a comment", b"event: x", b"id: 7"]
    for data in EVENTS:
        lines += [b"data: " + line for line in data.split(b"\n")] + [b""]
    return ending.join(lines) + ending


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(ending: bytes, cuts: list[int]) -> None:
    text = encoded(ending)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parser = SseParser()
    found = [event for a, b in pairwise(places) for event in parser.feed(text[a:b])]
    # A lone CR may be half of a CRLF, so the last event may wait for one more byte.
    found += parser.feed(b"\n") if ending == b"\r" else ()
    assert found == EVENTS
    assert parser.complete


def test_an_event_without_its_blank_line_is_incomplete() -> None:
    parser = SseParser()
    assert list(parser.feed(b"data: x\n")) == []
    assert not parser.complete
    assert list(parser.feed(b"\n")) == [b"x"]
    assert parser.complete


def test_a_line_without_end_is_bounded() -> None:
    parser = SseParser()
    for _ in range(64):
        assert list(parser.feed(b"x" * (1 << 20))) == []
    with pytest.raises(ValueError, match="64 MiB"):
        list(parser.feed(b"x"))
