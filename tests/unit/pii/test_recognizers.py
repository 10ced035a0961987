"""What is found and what is not, by table and by generated values with valid check digits."""

from __future__ import annotations

import json
import sys
import unicodedata
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sealmesh.gateway.pii import Span, detect
from sealmesh.gateway.pii.normalize import normalize

_VECTORS = Path(__file__).parents[2] / "vectors" / "pii" / "spans.jsonl"


class Case(NamedTuple):
    note: str
    text: str
    spans: list[tuple[int, int, str]]


def _cases() -> list[Case]:
    cases = []
    for line in _VECTORS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cases.append(Case(row["note"], row["text"], [(a, b, kind) for a, b, kind in row["spans"]]))
    return cases


def _found(text: str) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.type) for span in detect(text)]


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.note)
def test_vector(case: Case) -> None:
    assert _found(case.text) == case.spans


@st.composite
def cn_ids(draw: st.DrawFn) -> str:
    region = draw(st.integers(110000, 659999))
    born = date(1930, 1, 1) + timedelta(days=draw(st.integers(0, 34000)))
    body = f"{region}{born:%Y%m%d}{draw(st.integers(0, 999)):03}"
    # ISO 7064 mod 11-2 computed by its recursive definition, not by the weights that the code uses.
    product = 10
    total = 0
    for char in body:
        total = ((total + int(char)) * 2) % 11
    product = (12 - total) % 11
    return body + ("X" if product == 10 else str(product))


@st.composite
def cards(draw: st.DrawFn) -> str:
    prefix, size = draw(st.sampled_from([("622202", 19), ("621700", 16), ("4", 16), ("53", 16), ("37", 15)]))
    body = prefix + "".join(draw(st.lists(st.sampled_from("0123456789"), min_size=18, max_size=18)))
    body = body[: size - 1]
    for check in "0123456789":
        digits = [int(char) for char in reversed(body + check)]
        if sum(digits[::2] + [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]) % 10 == 0:
            return body + check
    raise AssertionError("one of ten digits must pass")


mobiles = st.from_regex(r"\A1[3-9][0-9]{9}\Z")
emails = st.from_regex(r"\A[a-z][a-z0-9]{2,10}(\.[a-z0-9]{2,8})?@[a-z0-9]{2,12}\.(com|cn|com\.cn|org)\Z")
before = st.sampled_from(["", "我的", "麻烦把", "请核对：", "see ", "（", "\n", "=", "号码是", "😀"])
after = st.sampled_from(["", "，谢谢", "请核实", " and reply", "）", "\n", "。", "、"])


@given(before, cn_ids(), after)
def test_generated_identity_numbers(head: str, value: str, tail: str) -> None:
    assert _found(head + value + tail) == [(len(head), len(head) + 18, "CN_ID")]


@given(before, cards(), after)
def test_generated_cards(head: str, value: str, tail: str) -> None:
    spans = detect(head + value + tail)
    assert [(span.start, span.end) for span in spans] == [(len(head), len(head) + len(value))]
    # One card of 18 digits in a thousand is an identity number too; none here has 18.
    assert spans[0].type == "BANK_CARD"


@given(before, mobiles, after)
def test_generated_mobiles(head: str, value: str, tail: str) -> None:
    assert _found(head + value + tail) == [(len(head), len(head) + 11, "CN_MOBILE")]


@given(st.sampled_from(["", "邮箱", "to ", "（", "=", "\n"]), emails, after)
def test_generated_mailboxes(head: str, value: str, tail: str) -> None:
    spans = detect(head + value + tail)
    assert (spans[0].start, spans[-1].end) == (len(head), len(head) + len(value))
    assert len(spans) == 1


_INVISIBLE = "\u200b\u200d\u00ad\ufeff\u2060"


@given(cn_ids(), st.lists(st.tuples(st.integers(1, 17), st.sampled_from(_INVISIBLE)), max_size=6))
def test_invisible_characters_do_not_hide_a_value(value: str, inserted: list[tuple[int, str]]) -> None:
    text = value
    for position, char in sorted(inserted, reverse=True):
        text = text[:position] + char + text[position:]
    assert _found("证" + text + "。") == [(1, 1 + len(text), "CN_ID")]


@given(st.text())
@example("1" * 30 + "X")
@example("\u200b" * 5 + "13800138000" + "\u200b" * 5)
@example("+" * 5 + "8613800138000")
@example("@" * 10 + "a@b.cn")
def test_spans_are_ordered_and_inside_any_text(text: str) -> None:
    end = 0
    for span in detect(text):
        assert end <= span.start < span.end <= len(text)
        assert 0 < span.score <= 1
        end = span.end


def test_a_span_does_not_hold_the_value() -> None:
    assert detect("13800138000") == [Span(0, 11, "CN_MOBILE", 0.85)]
    assert "138" not in repr(detect("13800138000"))


def test_every_decimal_digit_of_unicode_is_read() -> None:
    # Digits that a Unicode younger than the table knows are left out.
    known = [chr(code) for code in range(128, sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Nd"]
    for char in known:
        assert normalize(char).text == str(unicodedata.decimal(char)), hex(ord(char))


@given(st.text(alphabet=st.sampled_from("1２\u200b\u00a0－汉😀a")))
def test_offsets_lead_back_to_the_source(text: str) -> None:
    view = normalize(text)
    for index, char in enumerate(view.text):
        start, end = view.to_source(index, index + 1)
        assert end == start + 1
        assert normalize(text[start:end]).text == char


_MOBILES = ["13800138000", "138 0013 8000", "138-0013-8000", "+86 138 0013 8000"]
_CARDS = ["6222021234567890128", "4111 1111 1111 1111", "4111-1111-1111-1111", "3782 822463 10005"]
_LISTED = st.sampled_from([*_MOBILES, *_CARDS, "a@b.cn", "11010519491231002X"])


@given(st.lists(_LISTED, min_size=1, max_size=4), st.sampled_from([" ", "，", "\n", "、", " / "]))
def test_values_do_not_hide_one_another(values: list[str], joint: str) -> None:
    """What is left when the values that were found are taken out holds no value any more."""
    text = joint.join(values)
    for span in reversed(detect(text)):
        text = text[: span.start] + "…" + text[span.end :]
    assert detect(text) == []
    assert not [value for value in values if value in text]
