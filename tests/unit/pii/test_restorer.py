"""Restoring: what a model wrote becomes what the caller sent, however the text is cut."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sealmesh.gateway.pii import PiiFilter, Restorer
from sealmesh.gateway.pii.placeholders import Entry, RestoreTable, TypedCodes, fold

_ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "vectors" / "pii" / "answers.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
_TABLE = RestoreTable(
    {
        "k7q2m": Entry("phone", "138 0013 8000"),
        "k7q2mab": Entry("phone", "+8613800138000"),
        "bc5ud": Entry("email", "li@example.com"),
        "hbu6e": Entry("card", "6222021234567890128"),
    }
)
_BRACKETS_AND_JOINTS = ["[", "]", "⟦", "】", "(", "_", "\\_", "-", ":", " ", "  ", "\n", '"', "。"]
_LABELS = ["PHONE", "phone", "手机", "手机号", "EMAIL", "card"]
_CODES = ["k7q2m", "K7Q2M", "k7", "q2m", "k7q2mab", "bc5ud", "hbu6e", "a", "x1", "😀", "\u212a"]
_PIECES = st.sampled_from([*_BRACKETS_AND_JOINTS, *_LABELS, *_CODES])
answers = st.lists(_PIECES, max_size=24).map("".join)


def _restore(pieces: list[str], *, json_escaped: bool = False) -> str:
    restorer = Restorer(_TABLE, json_escaped=json_escaped)
    return "".join([restorer.feed(piece) for piece in pieces]) + restorer.flush()


def _cut(text: str, cuts: tuple[int, ...]) -> list[str]:
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row["note"])
def test_recorded_answer(row: dict[str, str]) -> None:
    assert _restore([row["answer"]]) == row["restored"]


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row["note"])
def test_recorded_answer_at_every_split(row: dict[str, str]) -> None:
    answer = row["answer"]
    assert _restore(list(answer)) == row["restored"]
    for cuts in (1, 2) if len(answer) < 60 else (1,):
        for places in combinations(range(1, len(answer)), cuts):
            assert _restore(_cut(answer, places)) == row["restored"]


def test_three_cuts_at_every_place() -> None:
    answer = "到[PHONE_k7q2m],EMAIL_bc5ud。"
    whole = _restore([answer])
    assert whole == "到138 0013 8000,li@example.com。"
    for places in combinations(range(1, len(answer)), 3):
        assert _restore(_cut(answer, places)) == whole


@given(answers, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_any_chunking_gives_the_same_text(answer: str, places: list[int], json_escaped: bool) -> None:
    cuts = tuple(sorted(place % (len(answer) + 1) for place in places))
    whole = _restore([answer], json_escaped=json_escaped)
    assert _restore(_cut(answer, cuts), json_escaped=json_escaped) == whole


@given(answers)
def test_text_is_held_back_only_where_it_can_become_a_placeholder(answer: str) -> None:
    """Whatever is held, some continuation of it must make the restorer put a value there."""
    restorer = Restorer(_TABLE)
    for char in answer:
        restorer.feed(char)
        held = restorer.held
        if not held:
            continue
        for code, entry in _TABLE.entries.items():
            labels = [label for label, main in _TABLE.label_of.items() if main == entry.label]
            whole = [
                f"{opening}{pad}{label}{joint}{code}"
                for label in labels
                for joint in _joints(held)
                for opening, pad in _openings(held)
            ]
            if any(_continues(held, text) for text in whole):
                break
        else:
            raise AssertionError(f"{held!r} cannot become a placeholder")


def _openings(held: str) -> list[tuple[str, str]]:
    bare = held.lstrip(" [⟦(")
    lead = held[: len(held) - len(bare)]
    return [(lead[:1], lead[1:])]


def _joints(held: str) -> set[str]:
    joints = {"_"}
    for start in range(len(held)):
        for end in range(start + 1, min(start + 3, len(held)) + 1):
            if set(held[start:end]) <= set("_-: \\"):
                joints.add(held[start:end])
    return joints


def _continues(held: str, whole: str) -> bool:
    held, whole = fold(held), fold(whole)
    return whole.startswith(held) or (held.startswith(whole) and held[len(whole) :] in ("", " ", "  "))


@pytest.mark.parametrize(
    "text",
    ["plain text", "a[0] ", "x = {y}", "photo", "[P.", "[PHONE_x", "电话号", "1 2 3 ", "[PHONE.", "[[x"],
)
def test_nothing_is_held_without_a_viable_prefix(text: str) -> None:
    restorer = Restorer(RestoreTable({"k7q2m": Entry("phone", "1")}))
    out = restorer.feed(text)
    assert (out, restorer.held) == ((text, "") if text != "电话号" else ("", text))


def test_a_restorer_without_placeholders_passes_text_through() -> None:
    restorer = Restorer(RestoreTable({}))
    assert restorer.feed("[PHONE_") == "[PHONE_"
    assert restorer.flush() == ""


def test_a_restorer_starts_afresh_after_flush() -> None:
    restorer = Restorer(_TABLE)
    assert restorer.feed("my") + restorer.flush() == "my"
    assert restorer.feed("PHONE_k7q2m") + restorer.flush() == "138 0013 8000"


@given(st.text(min_size=1))
def test_values_are_escaped_in_tool_arguments(value: str) -> None:
    table = RestoreTable({"k7q2m": Entry("phone", value)})
    restorer = Restorer(table, json_escaped=True)
    arguments = '{"to": "[PHONE_k7q2m]", "n": ["x[PHONE_k7q2m]"]}'
    restored = "".join(restorer.feed(char) for char in arguments) + restorer.flush()
    assert json.loads(restored) == {"to": value, "n": ["x" + value]}


def test_a_backslash_in_tool_arguments_begins_an_escape() -> None:
    """A tab between label and code is `\\t` in JSON: not a separator and a code with a "t"."""
    table = RestoreTable({"tk7q2": Entry("phone", "13800138000")})
    restorer = Restorer(table, json_escaped=True)
    arguments = json.dumps({"a": "PHONE\tk7q2"})
    assert restorer.feed(arguments) + restorer.flush() == arguments


_FILTER = PiiFilter(bytes(range(32)), 7)


def _placeholder(value: str) -> str:
    return _FILTER.mask_text(value).text


def _look_alikes(placeholder: str) -> list[str]:
    return [
        placeholder,
        placeholder.lower(),
        placeholder[1:-1],
        placeholder[:-3],
        placeholder[:-1] + "ab]",
        placeholder[:-1] + "\u212a",
        placeholder.replace("[", "【 "),
        placeholder.replace("_", "\\_"),
        placeholder.replace("PHONE", "手机"),
    ]


_VALUES = ["13800138000", "138 0013 8000", "+86-13800138000", "a@b.cn", "A@b.cn", "11010519491231002X"]
_TYPED = [form for value in _VALUES for form in _look_alikes(_placeholder(value))]
_GLUE = ["，", " ", "[", "]", "phone", "_", "请回复", "\u200b", "id: "]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(_VALUES + _TYPED + _GLUE), max_size=12))
@example([_placeholder("13800138000")[1:-1], "13800138000"])
@example(["QQ", "13800138000", "abc"])
@example(["wx", "13800138000", "ok"])
@example(["13800138000", "phone"])
def test_mask_and_echo_gives_back_what_was_typed(parts: list[str]) -> None:
    """Also for typed look-alikes of the very placeholders that the values of the text would get."""
    text = "".join(parts)
    masked = _FILTER.mask_text(text)
    assert masked.session.restore_text(masked.text) == text


@settings(max_examples=300)
@given(st.lists(st.sampled_from(_VALUES), min_size=1, max_size=3), st.sampled_from(_TYPED))
def test_a_typed_look_alike_never_becomes_a_value(values: list[str], typed: str) -> None:
    text = "，".join(values) + f"。请原样输出：{typed}。"
    masked = _FILTER.mask_text(text)
    assert typed in masked.text
    assert masked.session.restore_text(f"好的：{typed}。") == f"好的：{typed}。"


@given(st.text(alphabet=st.sampled_from("phonePHONE_K7q2m\u212a\u0130 -[\\ıſ")))
def test_every_code_that_a_restorer_would_read_is_reserved(text: str) -> None:
    for code in ("k7q2m", "7q", "k", "m"):
        table = RestoreTable({code: Entry("phone", "!")})
        restorer = Restorer(table)
        if "!" in restorer.feed(text) + restorer.flush():
            assert code in TypedCodes([text])
