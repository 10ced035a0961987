"""Numbers that ASCII letters touch: still personal data, unless hashes and ids are what they are part of."""

from __future__ import annotations

import base64
import hashlib
import random
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.pii import detect

_MOBILE = "13812345678"
_ID = "11010519491231002X"
_CARD = "6222021234567890128"


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("QQ13812345678", _MOBILE, "CN_MOBILE"),
        ("a13812345678", _MOBILE, "CN_MOBILE"),
        ("13812345678abc", _MOBILE, "CN_MOBILE"),
        ("13812345678x", _MOBILE, "CN_MOBILE"),
        ("13812345678xyz", _MOBILE, "CN_MOBILE"),
        ("a8613812345678", "8613812345678", "CN_MOBILE"),
        ("wx138-1234-5678", "138-1234-5678", "CN_MOBILE"),
        ("phone13812345678abc", _MOBILE, "CN_MOBILE"),
        ("vx13812345678ok", _MOBILE, "CN_MOBILE"),
        ("user2call13812345678", _MOBILE, "CN_MOBILE"),
        ("contact13812345678from2023", _MOBILE, "CN_MOBILE"),
        ("/v1/users/a13812345678", _MOBILE, "CN_MOBILE"),
        ("我的QQ13812345678谢谢", _MOBILE, "CN_MOBILE"),
        ("ＱＱ１３８１２３４５６７８", "１３８１２３４５６７８", "CN_MOBILE"),
        ("ID11010519491231002X", _ID, "CN_ID"),
        ("11010519491231002Xabc", _ID, "CN_ID"),
        ("A11010519491231002XB", _ID, "CN_ID"),
        ("a11010519491231002x9", "11010519491231002x", "CN_ID"),
        ("no110105 19491231 002Xb", "110105 19491231 002X", "CN_ID"),
        ("6222021234567890128abc", _CARD, "BANK_CARD"),
        ("6222021234567890128X", _CARD, "BANK_CARD"),
        ("ICBC6222021234567890128", _CARD, "BANK_CARD"),
        ("A6222021234567890128B", _CARD, "BANK_CARD"),
        ("visa4111111111111111exp", "4111111111111111", "BANK_CARD"),
    ],
)
def test_letters_do_not_hide_a_value(text: str, value: str, kind: str) -> None:
    found = [(text[span.start : span.end], span.type) for span in detect(text)]
    assert found == [(value, kind)]


@pytest.mark.parametrize(
    "text",
    [
        "A13812345678B",  # a serial number
        "ORD13812345678CN",
        "0x13812345678",
        "a113812345678",  # twelve digits
        "13812345678900abc",
        "9f3ab13812345678",  # 16 hexadecimal digits, as span ids have
        "13812345678ab9f3",
        "da39a3ee5e6b4b0d3255bfef9a13812345678abc",  # SHA-1
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b78a13812",
        "13812345678fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b85",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495c13812345678",
        "E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495C13812345678",
        "account: 4111111111111111afbf4c8996fb92427ae41e4649b934ca495991b7",
        "call_13812345678abc9f3e2d1c0b",
        "3f2504e0-4f89-11d3-9a0c-13812345678a",  # UUIDs
        "3f2504e0-4f89-11d3-9a0c-a13812345678",
        "3f2504e0-a138-1234-5678-0305e82c3301",
        "4111111a-1111-1111-9a0c-0305e82c3301",
        "QUJD13812345678REVGx9==",  # base64
        "aGVsbG8gd29ybGQ4a13812345678",
        "13812345678aGVsbG8gd29ybGQ4",
        "aGVsbG8g4111111111111111d29ybGQ4",
        "ID110105194912310021",  # wrong check character
        "ID11010519491331002X",  # no such month
        "6222021234567890127abc",  # wrong check digit
        "card 6222021234567890127abc",
        "9922021234567890128abc",  # no such BIN
    ],
)
def test_hashes_and_ids_are_left_alone(text: str) -> None:
    assert detect(text) == []


def test_random_hashes_and_ids_are_left_alone() -> None:
    source = random.Random(20260101)
    texts = []
    for _ in range(3000):
        raw = source.randbytes(48)
        texts += [
            hashlib.sha1(raw, usedforsecurity=False).hexdigest(),
            hashlib.sha256(raw).hexdigest().upper(),
            hashlib.sha512(raw).hexdigest(),
            base64.b64encode(raw).decode(),
            base64.urlsafe_b64encode(raw).decode(),
        ]
    found = [text for text in texts if detect(text)]
    assert found == []
    # UUIDs are short and mostly digits: some are all digits for 16 places, as before.
    uuids = [str(uuid.UUID(bytes=source.randbytes(16), version=4)) for _ in range(20_000)]
    assert sum(bool(detect(text)) for text in uuids) <= 2


@given(
    st.sampled_from([_MOBILE, _ID, _CARD]),
    st.from_regex(r"\A[A-Za-z]{1,12}\Z"),
    st.booleans(),
)
def test_any_word_on_one_side(value: str, word: str, left: bool) -> None:
    text = word + value if left else value + word
    start = len(word) if left else 0
    assert [(span.start, span.end) for span in detect(text)] == [(start, start + len(value))]
