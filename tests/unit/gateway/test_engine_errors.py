"""What the engine's own errors become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.engine_errors import OPENAI_CODE, engine_error, plain_message
from sealmesh.gateway.fields import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

_DUMP = (
    "19 validation errors:\n"
    "  {'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be a valid number, "
    "unable to parse string as a number', 'input': '13812345678 x'}\n"
    "  {'type': 'int_parsing', 'loc': 'body.seed', 'msg': 'Input should be a valid integer', 'input': 'y'}"
)
_CTX_DUMP = (
    "1 validation error:\n  {'type': 'value_error', 'loc': 'body', 'msg': \"Value error, you can't set "
    "`top_logprobs` without `logprobs`.\", 'input': {'model': 'm'}, 'ctx': {'error': ValueError('x')}}"
)
_PYDANTIC = (
    "1 validation error for ChatCompletionRequest\ntools\n  Input should be a valid list "
    "[type=list_type, input_value='13812345678', input_type=str]\n    For further information visit https://x"
)
_CONTEXT = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 5000 input tokens. "
    "Please reduce the length of the input prompt. (parameter=input_tokens, value=5000)"
)


def error(message: str, param: str | None = None, code: int = 400) -> dict[str, object]:
    return {"error": {"message": message, "type": "Bad Request", "param": param, "code": code}}


@pytest.mark.parametrize(
    ("raw", "param", "message", "field", "code"),
    [
        (
            _DUMP,
            "body.temperature",
            "temperature: Input should be a valid number, unable to parse string as a number",
            "temperature",
            "invalid_value",
        ),
        (_CTX_DUMP, "body", "you can't set `top_logprobs` without `logprobs`.", None, "invalid_value"),
        (_PYDANTIC, None, "Input should be a valid list", None, "invalid_value"),
        (
            "n must be at most 16384, got 20000. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable.",
            None,
            "n must be at most 16384, got 20000.",
            None,
            "invalid_value",
        ),
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            None,
            "this model is served without a parser for tool calls: set tool_choice to 'none', or ask the "
            "operator to configure a parser",
            "tool_choice",
            "unsupported",
        ),
        (
            "start vLLM with --enable-lora",
            None,
            "the model does not serve a request like this one; ask the operator",
            None,
            "unsupported",
        ),
        (
            "suffix is not currently supported",
            "suffix",
            "suffix is not currently supported",
            "suffix",
            "unsupported",
        ),
    ],
)
def test_refusals(raw: str, param: str | None, message: str, field: str | None, code: str) -> None:
    told = engine_error(400, error(raw, param), CHAT_COMPLETIONS)
    assert told.reason == "INVALID_REQUEST"
    assert told.http_status == 400
    assert (told.message, told.field, told.metadata[OPENAI_CODE]) == (message, field, code)


@pytest.mark.parametrize(("path", "field"), [(CHAT_COMPLETIONS, "messages"), (COMPLETIONS, "prompt")])
def test_a_prompt_that_is_too_long(path: str, field: str) -> None:
    told = engine_error(400, error(_CONTEXT, "input_tokens"), path)
    assert told.reason == "CONTEXT_TOO_LONG"
    assert told.field == field
    assert told.message.startswith("This model's maximum context length is 2048 tokens.")
    assert told.message.endswith("Please reduce the length of the input prompt.")


def test_a_limit_told_by_flags_alone() -> None:
    told = engine_error(400, error("max_tokens is over max_model_len; set --max-model-len"), COMPLETIONS)
    assert told.reason == "CONTEXT_TOO_LONG"
    assert "context" in told.message
    assert "model_len" not in told.message


@pytest.mark.parametrize(
    ("status", "document"),
    [
        (404, {"detail": "Not Found"}),
        (405, {"detail": "Method Not Allowed"}),
        (400, error("The model does not support Embeddings API")),
    ],
)
def test_a_model_without_embeddings(status: int, document: object) -> None:
    told = engine_error(status, document, EMBEDDINGS)
    assert told.reason == "INVALID_REQUEST"
    assert told.field == "model"
    assert told.metadata[OPENAI_CODE] == "unsupported"
    assert "does not make embeddings" in told.message


def test_a_model_that_the_worker_does_not_know() -> None:
    told = engine_error(404, error("The model `x` does not exist.", "model", 404), CHAT_COMPLETIONS)
    assert (told.reason, told.field, told.http_status) == ("MODEL_NOT_FOUND", "model", 404)
    assert told.message == "The model `x` does not exist."


@pytest.mark.parametrize("status", [200, 500])
def test_an_engine_that_failed_shows_nothing_of_itself(status: int) -> None:
    raw = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    told = engine_error(status, error(raw, code=500), CHAT_COMPLETIONS)
    assert (told.reason, told.http_status) == ("ENGINE_FAILED", 503)
    assert told.message == "the engine failed; send the request again"
    assert told.retry_after_s


def test_an_error_inside_a_stream_has_its_own_status() -> None:
    assert engine_error(200, error("a bad field", code=400), CHAT_COMPLETIONS).reason == "INVALID_REQUEST"


@pytest.mark.parametrize("document", [None, [], "x", {}, {"error": "x"}, {"error": {"message": 5}}])
def test_odd_documents_are_still_errors(document: object) -> None:
    assert engine_error(200, document, CHAT_COMPLETIONS).reason == "ENGINE_FAILED"
    assert engine_error(400, document, CHAT_COMPLETIONS).message


@given(st.text() | st.text().map(lambda tail: "3 validation errors:\n" + tail))
def test_any_message_becomes_one_bounded_line(raw: str) -> None:
    line = plain_message(raw)
    assert len(line) <= 300
    assert len(line.splitlines()) <= 1
