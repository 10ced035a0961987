"""The allow-list of request fields."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.field_types import TYPES
from sealmesh.gateway.fields import (
    _ALLOWED,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    Json,
    JsonObject,
    admit,
)
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


_STRAY = "13812345678 x"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.5, None], [_STRAY, True, [1], {}]),
        ("top_p", [1, 0.1], ["0.1"]),
        ("max_tokens", [5, 5.0, None], ["5", 5.5, True, [5], float("nan"), float("inf")]),
        ("seed", [9007199254740993], [_STRAY]),
        ("n", [1, 16], [0, -1, 17, 1.5, "2", True]),
        ("ignore_eos", [True, False], [1, "true", _STRAY]),
        ("parallel_tool_calls", [True], [_STRAY]),
        ("logprobs", [True, 3], [_STRAY, 0.5]),
        ("stop_token_ids", [[1, 2], []], [_STRAY, [_STRAY], 5]),
        ("logit_bias", [{"5": -1.5}, {}], [_STRAY, {"5": _STRAY}, [1]]),
        ("bad_words", [["a"]], [_STRAY, [1]]),
        ("stop", ["a", ["a", "b"], []], [5, [5], {"a": 1}]),
        ("stream_options", [{"include_usage": True}], [_STRAY, {"include_usage": _STRAY}]),
        ("response_format", [{"type": "text"}], [_STRAY]),
        ("structured_outputs", [{"regex": "a"}], [_STRAY]),
        ("tools", [[{"type": "function", "function": {"name": "f"}}]], [_STRAY, [_STRAY]]),
        ("tool_choice", ["auto", {"type": "function"}], [5, True]),
        ("truncation_side", ["left"], [_STRAY, 1]),
        ("reasoning_effort", ["low"], [1]),
        ("stream", [True, None], ["yes", 1]),
    ],
)
def test_types_of_settings(name: str, good: list[Json], bad: list[Json]) -> None:
    for value in good:
        assert admit(CHAT_COMPLETIONS, CHAT | {name: value})[name] == value
    for value in bad:
        with pytest.raises(SealmeshError) as caught:
            admit(CHAT_COMPLETIONS, CHAT | {name: value})
        assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", name)
        assert name in caught.value.message
        assert "138" not in caught.value.message


def test_every_field_but_the_text_has_a_type() -> None:
    """Whatever else is admitted is text that the filter reads, and is checked where it is."""
    for path, text in (
        (CHAT_COMPLETIONS, {"messages", "chat_template_kwargs"}),
        (COMPLETIONS, {"prompt"}),
        (EMBEDDINGS, {"input"}),
    ):
        assert _ALLOWED[path] - text - {"model"} <= TYPES.keys()


def test_the_limit_of_choices_is_the_operators() -> None:
    assert admit(CHAT_COMPLETIONS, CHAT | {"n": 2}, max_choices=2)["n"] == 2
    with pytest.raises(SealmeshError, match=r"n must be from 1 to 2 .*max_choices"):
        admit(CHAT_COMPLETIONS, CHAT | {"n": 3}, max_choices=2)
    with pytest.raises(SealmeshError, match="best_of"):
        admit(COMPLETIONS, {"model": "m", "prompt": "x", "best_of": 2})


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_known_roles(role: str) -> None:
    body = CHAT | {"messages": [{"role": role, "content": "x"}]}
    assert admit(CHAT_COMPLETIONS, body) == body


@pytest.mark.parametrize("role", [None, "", "User", _STRAY, 5, ["user"], {}])
def test_other_roles(role: Json) -> None:
    with pytest.raises(SealmeshError) as caught:
        admit(CHAT_COMPLETIONS, CHAT | {"messages": [{"role": role, "content": "x"}]})
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "messages[0].role")
    assert "138" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"), [("name", 5), ("tool_call_id", 5), ("tool_calls", "x"), ("tool_calls", ["x"])]
)
def test_types_in_messages(name: str, value: Json) -> None:
    with pytest.raises(SealmeshError) as caught:
        admit(CHAT_COMPLETIONS, CHAT | {"messages": [{"role": "assistant", "content": "x", name: value}]})
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", f"messages[0].{name}")


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
