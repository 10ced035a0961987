"""The allow-list of request fields."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.fields import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, Json, JsonObject, admit
from sealmesh.telemetry.runtime.errors import SealmeshError

CHAT: JsonObject = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "name",
    [
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "user",
        "request_id",
        "session_id",
        "metadata",
        "store",
        "service_tier",
    ],
)
def test_left_out(name: str) -> None:
    assert admit(CHAT_COMPLETIONS, CHAT | {name: "x"}) == CHAT


@pytest.mark.parametrize("name", ["chat_template", "documents", "priority", "prompt_embeds", "anything"])
def test_null_says_nothing(name: str) -> None:
    """Clients of some languages send null for what they do not set."""
    assert admit(CHAT_COMPLETIONS, CHAT | {name: None}) == CHAT


def test_what_other_answers_hold_may_come_back_as_history() -> None:
    message: JsonObject = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    admitted = admit(CHAT_COMPLETIONS, CHAT | {"messages": [message]})
    assert admitted["messages"] == [
        {
            name: message[name]
            for name in ("role", "content", "refusal", "function_call", "reasoning", "tool_calls")
        }
    ]


@pytest.mark.parametrize("switches", [{"enable_thinking": False}, {"thinking": True}, {}])
def test_template_switches_without_text(switches: JsonObject) -> None:
    body = CHAT | {"chat_template_kwargs": switches}
    assert admit(CHAT_COMPLETIONS, body)["chat_template_kwargs"] == switches


@pytest.mark.parametrize("switches", [{"enable_thinking": "yes"}, {"other": True}, "x", [1]])
def test_template_switches_with_text(switches: JsonObject) -> None:
    with pytest.raises(SealmeshError) as caught:
        admit(CHAT_COMPLETIONS, CHAT | {"chat_template_kwargs": switches})
    assert caught.value.reason == "FIELD_REFUSED"


def test_unknown_message_fields_are_refused_by_place() -> None:
    with pytest.raises(SealmeshError) as caught:
        admit(CHAT_COMPLETIONS, CHAT | {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]})
    assert caught.value.field == "messages[0].audio"


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
def test_texts(path: str, field: str) -> None:
    texts: list[Json] = ["x", "", ["x"], ["x", "y"]]
    for good in texts:
        assert admit(path, {"model": "m", field: good})[field] == good
    others: list[tuple[Json, str]] = [
        ([1], "FIELD_REFUSED"),
        ([[1]], "FIELD_REFUSED"),
        ([1, "x"], "INVALID_REQUEST"),
        ([], "INVALID_REQUEST"),
        ({}, "INVALID_REQUEST"),
        (None, "INVALID_REQUEST"),
        (5, "INVALID_REQUEST"),
    ]
    for bad, reason in others:
        with pytest.raises(SealmeshError) as caught:
            admit(path, {"model": "m", field: bad})
        assert caught.value.reason == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "name", "tool_calls", "x"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_messages_are_admitted_or_refused_and_never_changed(messages: object) -> None:
    body: JsonObject = {"model": "m", "messages": messages}  # type: ignore[dict-item]
    before = copy.deepcopy(body)
    with contextlib.suppress(SealmeshError):
        for message in admit(CHAT_COMPLETIONS, body)["messages"]:  # type: ignore[union-attr]
            content = message["content"] if isinstance(message, dict) and "content" in message else None
            for part in content if isinstance(content, list) else ():
                assert isinstance(part, str) or part.keys() <= {"type", "text", "refusal"}  # type: ignore[union-attr]
    assert body == before


@given(st.sampled_from([(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")]), JSON)
def test_any_text_field_is_text_or_refused(where: tuple[str, str], value: object) -> None:
    path, field = where
    with contextlib.suppress(SealmeshError):
        admitted = admit(path, {"model": "m", field: value})[field]  # type: ignore[dict-item]
        assert isinstance(admitted, str) or all(isinstance(item, str) for item in admitted)  # type: ignore[union-attr]
