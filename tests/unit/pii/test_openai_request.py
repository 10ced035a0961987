"""Which strings of an OpenAI request are masked, which are left, which refuse the request."""

from __future__ import annotations

import copy
import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.pii import Detector, PiiFilter, PiiRefusedError, Span
from sealmesh.gateway.pii.json_text import json_tokens
from sealmesh.gateway.pii.openai_fields import request_leaves

_KEY = bytes(range(32))
_PHONE, _EMAIL, _ID = "13800138000", "li.wei@example.com", "11010519491231002X"
_VALUES = (_PHONE, _EMAIL, _ID)


def _mask(body: dict[str, object], *, allow_uninspectable: bool = False) -> dict[str, object]:
    return PiiFilter(_KEY, 1, allow_uninspectable=allow_uninspectable).mask_openai_request(body).body


def _user(content: object, **more: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **more}


def _assistant_call(arguments: str) -> dict[str, object]:
    call = {"id": "call_1", "type": "function", "function": {"name": "send", "arguments": arguments}}
    return {"model": "demo", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def _arguments(body: dict[str, object]) -> str:
    message = cast("list[dict[str, list[dict[str, dict[str, str]]]]]", body["messages"])[0]
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    "body",
    [
        _user(f"我的手机号是{_PHONE}"),
        _user([{"type": "text", "text": f"{_EMAIL}"}, {"type": "text", "text": "x"}]),
        {"messages": [{"role": "system", "content": f"客户{_ID}"}]},
        {"messages": [{"role": "developer", "content": _PHONE}]},
        {"messages": [{"role": "user", "name": _EMAIL, "content": "hi"}]},
        {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": f'{{"phone":{_PHONE}}}'}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": _PHONE, "refusal": _EMAIL}]},
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": f'["{_PHONE}"]'}}]},
        _assistant_call(json.dumps({"to": _EMAIL, "deep": [{"id": _ID}]})),
        _assistant_call(f"not json {_PHONE}"),
        _assistant_call(json.dumps({_PHONE: "a key that is data"})),
        {"model": "demo", "prompt": f"call {_PHONE}"},
        {"model": "demo", "prompt": ["a", f"mail {_EMAIL}"], "suffix": _ID},
        _user("hi", stop=[_PHONE]),
        _user("hi", stop=_PHONE),
        _user("hi", user=_EMAIL),
        _user("hi", metadata={"owner": _EMAIL, "nested": [{"x": _PHONE}]}),
        _user("hi", chat_template_kwargs={"who": _PHONE, "number": int(_PHONE)}),
        _user("hi", documents=[{"title": "t", "text": _ID}]),
        _user("hi", a_field_of_tomorrow={"text": _PHONE}),
        _user("hi", tools=[{"type": "function", "function": {"name": "f", "description": f"ask {_EMAIL}"}}]),
        _user(
            "hi",
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "description": {
                                    "type": "string",
                                    "description": f"like {_PHONE}",
                                    "default": _ID,
                                },
                                "to": {"anyOf": [{"title": _EMAIL}], "examples": [int(_PHONE)]},
                            },
                        },
                    },
                }
            ],
        ),
        _user(
            "hi",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"description": _EMAIL}},
            },
        ),
    ],
    ids=lambda body: json.dumps(body, ensure_ascii=False)[:60],
)
def test_no_value_is_left_in(body: dict[str, object]) -> None:
    before = copy.deepcopy(body)
    masked = PiiFilter(_KEY, 1).mask_openai_request(body)
    assert body == before, "the caller's body was changed"
    text = json.dumps(masked.body, ensure_ascii=False)
    assert not [value for value in _VALUES if value in text]
    assert "[PHONE_" in text or "[EMAIL_" in text or "[IDCARD_" in text
    assert masked.session.masked


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (_user("hi", tools=[{"function": {"name": "f" + _EMAIL}}]), "/tools/0/function/name"),
        (
            _user("hi", tools=[{"function": {"name": "f", "parameters": {"enum": ["a", _EMAIL]}}}]),
            "/tools/0/function/parameters/enum/1",
        ),
        (
            _user("hi", tools=[{"function": {"parameters": {"properties": {"x": {"const": _PHONE}}}}}]),
            "/tools/0/function/parameters/properties/x/const",
        ),
        (
            _user("hi", tools=[{"function": {"parameters": {"properties": {_EMAIL: {}}}}}]),
            "/tools/0/function/parameters/properties",
        ),
        (_user("hi", structured_outputs={"regex": _PHONE}), "/structured_outputs/regex"),
        (
            _user("hi", tool_choice={"type": "function", "function": {"name": _EMAIL}}),
            "/tool_choice/function/name",
        ),
        (_user("hi", metadata={_PHONE: "x"}), "/metadata"),
        ({"model": _EMAIL, "prompt": "x"}, "/model"),
    ],
)
def test_values_where_nothing_can_be_masked_refuse_the_request(body: dict[str, object], field: str) -> None:
    with pytest.raises(PiiRefusedError) as caught:
        _mask(body)
    assert (caught.value.reason, caught.value.field) == ("PII_BLOCKED", field)
    assert not [value for value in _VALUES if value in str(caught.value) + caught.value.field]
    masked = PiiFilter(_KEY, 1, allow_unmaskable=True).mask_openai_request(body)
    assert masked.body == body
    assert [finding.action for finding in masked.session.findings] == ["allow"]
    assert not masked.session.masked


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [1, 2, 3]}, "/prompt"),
        ({"prompt": [[1, 2], [3]]}, "/prompt"),
        ({"prompt": ["x", 5]}, "/prompt"),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, "/prompt_embeds"),
        (_user([{"type": "image_url", "image_url": {"url": "https://x.cn/a.png"}}]), "/messages/0/content/0"),
        (_user(["x", {"image_url": "https://x.cn/a.png"}]), "/messages/0/content/1"),
        (_user([{"type": "input_audio", "input_audio": {"data": "AAAA"}}]), "/messages/0/content/0"),
        (_user([{"type": "file", "file": {"file_data": "AAAA"}}]), "/messages/0/content/0"),
    ],
)
def test_what_cannot_be_read_is_refused(body: dict[str, object], field: str) -> None:
    with pytest.raises(PiiRefusedError) as caught:
        _mask(body)
    assert (caught.value.reason, caught.value.field) == ("FIELD_REFUSED", field)
    assert _mask(body, allow_uninspectable=True) is body


def test_names_schemas_and_settings_stay() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "lookup_phone",
            "parameters": {
                "type": "object",
                "properties": {
                    "phone": {"type": "string", "pattern": "^1[3-9]\\d{9}$", "enum": ["home", "work"]}
                },
                "required": ["phone"],
            },
        },
    }
    body = _user(
        f"我是{_PHONE}",
        tools=[tool],
        tool_choice="auto",
        seed=13800138000,
        temperature=0.0,
        logit_bias={"5": 1},
    )
    masked = _mask(body)
    assert masked["tools"] is body["tools"]
    assert {key: masked[key] for key in body if key != "messages"} == {
        key: body[key] for key in body if key != "messages"
    }


def test_a_body_without_personal_data_passes_as_the_same_object() -> None:
    body = _user("今天天气怎么样？[PHONE_k7q2m]", stream=True)
    masked = PiiFilter(_KEY, 1).mask_openai_request(body)
    assert masked.body is body
    assert not masked.session.masked
    assert masked.session.findings == ()


def test_findings_point_into_the_request() -> None:
    body: dict[str, object] = {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": f"手机{_PHONE}，邮箱{_EMAIL}"},
        ],
        "metadata": {"a/b~c": _ID},
    }
    session = PiiFilter(_KEY, 1).mask_openai_request(body).session
    assert [(f.field, f.start, f.end, f.type, f.action) for f in session.findings] == [
        ("/messages/1/content", 2, 13, "CN_MOBILE", "mask"),
        ("/messages/1/content", 16, 34, "EMAIL", "mask"),
        ("/metadata/a~1b~0c", 0, 18, "CN_ID", "mask"),
    ]
    assert session.counts == {"CN_MOBILE": 1, "EMAIL": 1, "CN_ID": 1}


def test_one_value_has_one_placeholder_in_all_fields() -> None:
    body = _assistant_call(json.dumps({"to": _PHONE, "number": int(_PHONE)}))
    cast("list[object]", body["messages"]).append({"role": "user", "content": f"拨打{_PHONE}"})
    masked = _mask(body)
    arguments = json.loads(_arguments(masked))
    content = cast("list[dict[str, str]]", masked["messages"])[1]["content"]
    assert content == f"拨打{arguments['to']}"
    assert arguments["number"] == arguments["to"]


def test_arguments_keep_everything_but_the_value() -> None:
    raw = '{ "a":1.50, "a" : "\\u4e2d\\n%s\\"x", "big":123456789012345678901234567890, "n":null,"e":1e5 }'
    masked = _arguments(_mask(_assistant_call(raw % _PHONE)))
    placeholder = _arguments(_mask(_assistant_call(f'"{_PHONE}"')))[1:-1]
    assert masked == raw.replace("\\u4e2d", "中") % placeholder


def test_escapes_in_arguments_do_not_hide_a_value() -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in _PHONE)
    masked = json.loads(_arguments(_mask(_assistant_call(f'{{"to": "{escaped}", "bad": "\\ud800"}}'))))
    assert masked["to"].startswith("[PHONE_")


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    """As a bare code point it would make the body impossible to send as UTF-8."""
    raw = f'{{"to": "\\ud800 {_PHONE}"}}'
    masked = PiiFilter(_KEY, 1).mask_openai_request(_assistant_call(raw))
    text = _arguments(masked.body)
    assert text.encode()
    assert masked.session.restore_text(text, json_escaped=True) == raw


def test_a_key_labels_its_value() -> None:
    """Twelve digits are a card only because the key says so."""
    masked = json.loads(
        _arguments(_mask(_assistant_call('{"bank_card": "060426070011", "order": "060426070011"}')))
    )
    assert masked["bank_card"].startswith("[CARD_")
    assert masked["order"] == "060426070011"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(_VALUES).map(lambda value: f'x"{value}\\'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=5), st.booleans())
def test_arguments_round_trip(arguments: dict[str, object], ensure_ascii: bool) -> None:
    raw = json.dumps(arguments, ensure_ascii=ensure_ascii)
    masked = PiiFilter(_KEY, 1).mask_openai_request(_assistant_call(raw))
    text = _arguments(masked.body)
    json.loads(text)
    assert not [value for value in _VALUES if value in text]
    restored = json.loads(masked.session.restore_text(text, json_escaped=True))
    # Long numbers that were masked come back as strings.
    assert json.dumps(restored).replace('"', "") == json.dumps(arguments).replace('"', "")


@given(_JSON)
def test_tokens_cover_every_string_and_number(value: object) -> None:
    raw = json.dumps(value, ensure_ascii=False)
    tokens = json_tokens(raw)
    assert tokens is not None
    rest = list(raw)
    for token in reversed(tokens):
        rest[token.start : token.end] = []
    assert set("".join(rest)) <= set("[]{}:, truefalsn-Infinity")


class _Broken(Detector):
    def detect(self, text: str, context: str = "") -> list[Span]:
        if "second" in text:
            raise RuntimeError("engine gone")
        return super().detect(text, context)


def test_a_failing_detector_fails_the_request() -> None:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": _PHONE}, {"role": "user", "content": "second"}]
    }
    with pytest.raises(RuntimeError, match="engine gone"):
        PiiFilter(_KEY, 1, detector=_Broken()).mask_openai_request(body)


def _nest(levels: int) -> object:
    nested: object = _PHONE
    for _ in range(levels):
        nested = [nested]
    return nested


def test_depth_is_limited() -> None:
    assert _PHONE not in json.dumps(_mask(_user("x", metadata=_nest(120))))
    for body in (
        _user("x", metadata=_nest(5000)),
        _user("x", tools=[{"function": {"parameters": {"items": _nest(5000)}}}]),
        _assistant_call("[" * 100_000 + f'"{_PHONE}"' + "]" * 100_000),
    ):
        with pytest.raises(PiiRefusedError) as caught:
            _mask(body)
        assert caught.value.reason == "FIELD_REFUSED"


def test_keys_are_read_too() -> None:
    assert {leaf.text for leaf in request_leaves({"a": {"b": "c"}})} == {"a", "b", "c"}


def test_texts_of_one_request_share_their_placeholders() -> None:
    masked, session = PiiFilter(_KEY, 1).mask_texts({"/prompt": f"是{_PHONE}", "/stop/0": _PHONE, "/x": "y"})
    assert masked["/prompt"] == "是" + masked["/stop/0"]
    assert masked["/x"] == "y"
    assert [finding.field for finding in session.findings] == ["/prompt", "/stop/0"]
