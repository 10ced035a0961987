"""Placeholders: stable, unlinkable between tenants and epochs, distinct inside a request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sealmesh.gateway.pii import PiiFilter
from sealmesh.gateway.pii.placeholders import PlaceholderBook, PlaceholderKey

_VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "pii" / "placeholders.json").read_text("utf-8")
)
_KEY = bytes(range(32))


@pytest.mark.parametrize("row", _VECTORS["values"], ids=lambda row: row["masked"])
def test_placeholders_stay_what_they_were(row: dict[str, object]) -> None:
    """A change here breaks the KV prefixes and transcripts of every tenant."""
    epoch, value = row["epoch"], row["value"]
    assert isinstance(epoch, int)
    assert isinstance(value, str)
    assert PiiFilter(bytes.fromhex(_VECTORS["key"]), epoch).mask_text(value).text == row["masked"]


def test_spellings_of_one_value_share_a_placeholder_across_requests() -> None:
    masked = {
        PiiFilter(_KEY, 1).mask_text(text).text
        for text in (
            "13800138000",
            "138-0013-8000",
            "+8613800138000",
            "１３８００１３８０００",
            "138\u200b00138000",
        )
    }
    assert len(masked) == 1
    assert re.fullmatch(r"\[PHONE_[a-z2-9]{5}\]", masked.pop())


def test_spellings_of_one_value_in_a_request_are_told_apart_and_related() -> None:
    masked = PiiFilter(_KEY, 1).mask_text("13800138000 138-0013-8000 13800138000")
    first, second, third = masked.text.split()
    assert first == third != second
    assert second.startswith(first[:-1])
    assert masked.session.restore_text(second) == "138-0013-8000"


def test_history_masks_to_the_same_text() -> None:
    """Turns that are added never change how earlier turns read, or KV prefixes would be lost."""
    turns = [
        "我是13800138000",
        "好的，13800138000",
        "另一个是138-0013-8000，邮箱a@b.cn",
        "知道了a@b.cn和139 0013 9000",
    ]
    pii = PiiFilter(_KEY, 1)
    seen: list[str] = []
    for count in range(1, len(turns) + 1):
        body: dict[str, object] = {"messages": [{"role": "user", "content": turn} for turn in turns[:count]]}
        messages = pii.mask_openai_request(body).body["messages"]
        assert isinstance(messages, list)
        now = [message["content"] for message in messages]
        assert now[: len(seen)] == seen
        seen = now


def test_tenants_and_epochs_do_not_share_placeholders() -> None:
    masked = {
        PiiFilter(key, epoch).mask_text("13800138000").text
        for key in (_KEY, bytes(32))
        for epoch in (0, 1, 2**64 - 1)
    }
    assert len(masked) == 6


class _Colliding(PlaceholderKey):
    """Gives every value codes that agree in their first eight characters."""

    def code(self, kind: str, value: str) -> str:
        return "aaaaabbb" + super().code(kind, value)


def test_a_collision_lengthens_the_later_code() -> None:
    book = PlaceholderBook(_Colliding(_KEY, 1), {"aaaaab"})
    one, two, three = (book.placeholder("EMAIL", name, name) for name in ("a@b.cn", "c@d.cn", "e@f.cn"))
    assert (one, two, three) == ("[EMAIL_aaaaa]", "[EMAIL_aaaaabb]", "[EMAIL_aaaaabbb]")
    assert {code: entry.value for code, entry in book.table().entries.items()} == {
        "aaaaa": "a@b.cn",
        "aaaaabb": "c@d.cn",
        "aaaaabbb": "e@f.cn",
    }


def test_a_thousand_values_stay_apart() -> None:
    text = " ".join(f"user{number}@example.com" for number in range(1000))
    masked = PiiFilter(_KEY, 1).mask_text(text)
    assert len(set(masked.text.split())) == 1000
    assert masked.session.restore_text(masked.text) == text


@pytest.mark.parametrize(("key", "epoch"), [(b"short", 1), (_KEY, -1), (_KEY, 2**64)])
def test_unfit_keys_and_epochs_are_refused(key: bytes, epoch: int) -> None:
    with pytest.raises(ValueError, match=r"key|epoch"):
        PiiFilter(key, epoch)


def test_values_do_not_show_in_representations() -> None:
    masked = PiiFilter(_KEY, 1).mask_text("手机13800138000")
    table = masked.session.restorer()
    assert "138" not in repr(masked) + repr(masked.session) + repr(masked.session.findings) + repr(table)
