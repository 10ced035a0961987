"""Answers of /v1/chat/completions and /v1/completions, whole and streamed."""

from __future__ import annotations

import codecs
import copy
import json
import random
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.pii import PiiFilter, PiiSession, StreamRestorer

Json = dict[str, object]

_PHONE = "138 0013 8000"


def _session() -> tuple[PiiSession, str]:
    masked = PiiFilter(bytes(range(32)), 1).mask_text(_PHONE)
    return masked.session, masked.text


_SESSION, _P = _session()


def _chunk(*choices: Json, **more: object) -> Json:
    head: Json = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": list(choices), **more}


def _delta(index: int, finish: str | None = None, **delta: object) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _call(index: int, arguments: str, **more: object) -> Json:
    return {"index": index, "function": {"arguments": arguments}, **more}


class Gathered:
    """What a client puts together from the chunks of a stream."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, str, int], str] = {}
        self.finished: dict[int, object] = {}

    def add(self, chunk: Json) -> None:
        for choice in cast("list[Json]", chunk["choices"]):
            index = cast("int", choice["index"])
            assert index not in self.finished, "text after the finish reason"
            if isinstance(text := choice.get("text"), str):
                self._append(index, "text", 0, text)
            for name, value in cast("Json", choice.get("delta") or {}).items():
                if isinstance(value, str):
                    self._append(index, name, 0, value)
                elif name == "tool_calls":
                    for call in cast("list[Json]", value):
                        function = cast("Json", call["function"])
                        arguments = cast("str", function.get("arguments") or "")
                        self._append(index, name, cast("int", call["index"]), arguments)
                elif name == "function_call":
                    self._append(index, name, 0, cast("str", cast("Json", value).get("arguments") or ""))
            if choice.get("finish_reason") is not None:
                self.finished[index] = choice["finish_reason"]

    def _append(self, index: int, name: str, call: int, text: str) -> None:
        key = (index, name, call)
        self.texts[key] = self.texts.get(key, "") + text


def _run(stream: StreamRestorer, chunks: list[Json]) -> Gathered:
    gathered = Gathered()
    for chunk in chunks:
        before = copy.deepcopy(chunk)
        gathered.add(stream.feed(chunk))
        assert chunk == before, "the caller's chunk was changed"
    last = stream.close()
    if last is not None:
        gathered.add(last)
    return gathered


def _pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def test_unary_chat() -> None:
    response: Json = {
        "id": "x",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": f"打{_P}",
                    "reasoning": f"{_P}?",
                    "reasoning_content": f"{_P}!",
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": f'{{"n": "{_P}"}}'},
                        }
                    ],
                    "function_call": {"name": "g", "arguments": f'["{_P}"]'},
                },
                "logprobs": {"content": [{"token": _P, "logprob": 0.0}]},
                "finish_reason": "stop",
            },
            {"index": 1, "message": {"role": "assistant", "content": [{"type": "text", "text": _P}]}},
        ],
        "usage": {"total_tokens": 5},
        "prompt_text": _P,
    }
    before = copy.deepcopy(response)
    restored = _SESSION.restore_unary(response)
    assert response == before
    expected = json.loads(json.dumps(response).replace(_P, _PHONE))
    expected["choices"][0]["logprobs"] = cast("list[Json]", response["choices"])[0]["logprobs"]
    expected["prompt_text"] = _P
    assert restored == expected


def test_unary_completion() -> None:
    response: Json = {"choices": [{"index": 0, "text": f"到{_P}", "logprobs": {"tokens": [_P]}}]}
    assert _SESSION.restore_unary(response) == {
        "choices": [{"index": 0, "text": f"到{_PHONE}", "logprobs": {"tokens": [_P]}}]
    }


def test_nothing_masked_passes_everything_through_untouched() -> None:
    session = PiiFilter(bytes(32), 1).mask_text("nothing here").session
    response: Json = {"choices": [{"index": 0, "message": {"content": _P}}]}
    chunk = _chunk(_delta(0, content=_P[:4]))
    stream = session.stream()
    assert session.restore_unary(response) is response
    assert stream.feed(chunk) is chunk
    assert stream.close() is None


@pytest.mark.parametrize(
    "body", [{"error": {"message": "x"}}, {"choices": []}, {"choices": None}, {"choices": [None]}]
)
def test_odd_responses_pass(body: Json) -> None:
    assert _SESSION.restore_unary(body) == body
    assert _SESSION.stream().feed(body) == body


@pytest.mark.parametrize("cut", range(len(_P) + 1))
def test_content_cut_anywhere(cut: int) -> None:
    chunks = [
        _chunk(_delta(0, role="assistant", content="")),
        _chunk(_delta(0, content="请拨" + _P[:cut])),
        _chunk(_delta(0, content=_P[cut:])),
        _chunk(_delta(0, "stop")),
        _chunk(usage={"total_tokens": 3}),
    ]
    gathered = _run(_SESSION.stream(), chunks)
    assert gathered.texts[0, "content", 0] == f"请拨{_PHONE}"
    assert gathered.finished == {0: "stop"}


def test_ordinary_text_is_never_delayed() -> None:
    stream = _SESSION.stream()
    for text in ("今天", "天气", "很好", " and", " fine", "。", "a[1]"):
        assert stream.feed(_chunk(_delta(0, content=text))) == _chunk(_delta(0, content=text))


def test_held_text_goes_out_in_the_finish_chunk() -> None:
    stream = _SESSION.stream()
    assert stream.feed(_chunk(_delta(0, content="see [PHO")))["choices"] == [_delta(0, content="see ")]
    assert stream.feed(_chunk(_delta(0, "length")))["choices"] == [_delta(0, "length", content="[PHO")]
    assert stream.close() is None


def test_held_text_of_a_finish_chunk_with_text_stays_in_order() -> None:
    stream = _SESSION.stream()
    stream.feed(_chunk(_delta(0, content="[")))
    chunk = stream.feed(_chunk(_delta(0, "stop", content="PH")))
    assert chunk["choices"] == [_delta(0, "stop", content="[PH")]


def test_held_text_goes_out_when_the_stream_breaks_off() -> None:
    stream = _SESSION.stream()
    stream.feed(_chunk(_delta(0, content="x[PHONE"), _delta(1, tool_calls=[_call(0, '{"a": "[')])))
    assert stream.close() == {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"content": "[PHONE"}, "finish_reason": None},
            {"index": 1, "delta": {"tool_calls": [_call(0, "[")]}, "finish_reason": None},
        ],
    }
    assert stream.close() is None


def test_held_reasoning_goes_out_before_the_content() -> None:
    stream = _SESSION.stream()
    stream.feed(_chunk(_delta(0, reasoning="so [")))
    chunk = stream.feed(_chunk(_delta(0, content="Yes")))
    assert chunk["choices"] == [_delta(0, content="Yes", reasoning="[")]


def test_held_arguments_go_out_before_the_next_call() -> None:
    stream = _SESSION.stream()
    stream.feed(_chunk(_delta(0, tool_calls=[_call(0, "[", id="a")])))
    chunk = stream.feed(_chunk(_delta(0, tool_calls=[_call(1, "{", id="b")])))
    # "{" may open a placeholder as well and waits for its continuation.
    assert chunk["choices"] == [_delta(0, tool_calls=[_call(0, "["), _call(1, "", id="b")])]
    assert stream.feed(_chunk(_delta(0, "tool_calls")))["choices"] == [
        _delta(0, "tool_calls", tool_calls=[_call(1, "{")])
    ]


def test_completions_stream() -> None:
    texts = ["到", _P[:3], _P[3:9], _P[9:], "[P"]
    chunks: list[Json] = [
        {"id": "1", "choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts
    ]
    chunks.append({"id": "1", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    assert _run(_SESSION.stream(), chunks).texts == {(0, "text", 0): f"到{_PHONE}[P"}


def test_logprobs_and_token_ids_stay() -> None:
    choice = {**_delta(0, content=_P), "logprobs": {"content": [{"token": _P}]}, "token_ids": [1, 2]}
    out = _SESSION.stream().feed(_chunk(choice, usage={"total_tokens": 1}))
    restored = cast("list[Json]", out["choices"])[0]
    assert restored == {**choice, "delta": {"content": _PHONE}}
    assert out["usage"] == {"total_tokens": 1}


_CUTS = st.lists(st.integers(0, 500), max_size=8)


@given(_CUTS, _CUTS, _CUTS, _CUTS, _CUTS, st.randoms(use_true_random=False))
def test_interleaved_choices_and_calls_restore_as_the_whole(
    c0: list[int], c1: list[int], a0: list[int], a1: list[int], r0: list[int], order: random.Random
) -> None:
    """Two choices, reasoning then content then two tool calls, every text cut anywhere."""
    reasoning, content = f"想[{_P}]一想[PHONE", f"好{_P}，PHONE_ [x] {_P}"
    arguments = [
        json.dumps({"to": f'"{_P}\\', "x": [_P]}, ensure_ascii=False),
        f'{{"n":"{_P.lower()[1:-1]}"}}',
    ]
    first = [_delta(0, reasoning_content=piece) for piece in _pieces(reasoning, r0)]
    first += [_delta(0, content=piece) for piece in _pieces(content, c0)]
    first += [_delta(0, tool_calls=[_call(0, piece)]) for piece in _pieces(arguments[0], a0)]
    first += [_delta(0, tool_calls=[_call(1, piece)]) for piece in _pieces(arguments[1], a1)]
    second = [_delta(1, content=piece) for piece in _pieces(content, c1)]
    streams = [[*first, _delta(0, "tool_calls")], [*second, _delta(1, "stop")]]
    chunks: list[Json] = []
    while any(streams):
        source = order.choice([stream for stream in streams if stream])
        chunks.append(_chunk(source.pop(0)))
    gathered = _run(_SESSION.stream(), chunks)
    restore = _SESSION.restore_text
    assert gathered.texts == {
        (0, "reasoning_content", 0): restore(reasoning),
        (0, "content", 0): restore(content),
        (0, "tool_calls", 0): restore(arguments[0], json_escaped=True),
        (0, "tool_calls", 1): restore(arguments[1], json_escaped=True),
        (1, "content", 0): restore(content),
    }
    assert json.loads(gathered.texts[0, "tool_calls", 0]) == {"to": f'"{_PHONE}\\', "x": [_PHONE]}
    assert json.loads(gathered.texts[0, "tool_calls", 1]) == {"n": _PHONE}
    assert gathered.finished == {0: "tool_calls", 1: "stop"}


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_a_recorded_event_stream_cut_at_every_byte(ensure_ascii: bool) -> None:
    """Bytes cut inside UTF-8 sequences, escapes and placeholders: framing first, then the restorer."""
    answer = f"您好😀，号码{_P}。PHONE{_P[6:-1]}"
    events = [_chunk(_delta(0, content=answer[at : at + 4])) for at in range(0, len(answer), 4)]
    events.append(_chunk(_delta(0, "stop")))
    wire = "".join(f"data: {json.dumps(event, ensure_ascii=ensure_ascii)}\n\n" for event in events).encode()
    for cut in range(len(wire) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        stream, gathered, buffer = _SESSION.stream(), Gathered(), ""
        for part in (wire[:cut], wire[cut:]):
            buffer += decoder.decode(part)
            *whole, buffer = buffer.split("\n\n")
            for event in whole:
                gathered.add(stream.feed(json.loads(event.removeprefix("data: "))))
        assert gathered.texts == {(0, "content", 0): f"您好😀，号码{_PHONE}。{_PHONE}"}
