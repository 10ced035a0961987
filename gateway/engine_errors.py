"""Errors of the engine's OpenAI layer in the words of this gateway.

The engine tells its cases apart by prose alone (vLLM 0.23 to 0.32), and that prose is for its operator:
flags, environment variables, dumps of a validator. Callers get one line, a field and a reason.
"""

from __future__ import annotations

import re
from typing import Final

import grpc
from sealmesh.gateway.fields import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["OPENAI_CODE", "engine_error", "plain_message"]

# Key of SealmeshError.metadata under which a more telling `code` for OpenAI's error object stands.
OPENAI_CODE: Final = "openai_code"
_MAX_CHARS: Final = 300
_MAX_RAW_CHARS: Final = 16 * 1024
_TOO_LONG: Final = (
    "maximum context length",
    "maximum model length",
    "max_model_len",
    "longer than the maximum",
)
_PROMPTS: Final = {CHAT_COMPLETIONS: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}
_UNSUPPORTED: Final = (
    "does not support",
    "not supported",
    "not currently supported",
    "unsupported",
    "not implemented",
)
_TOOLS_RE: Final = re.compile(r"--(?:enable-auto-tool-choice|tool-call-parser)")
# What only the operator of an engine can make use of.
_INTERNAL_RE: Final = re.compile(
    r"(?<![\w-])--[a-z][a-z-]+|\bVLLM_[A-Z_]+|\bvllm\b|EngineCore|EngineDead|[Ss]tack trace|Traceback"
    r"|\bFile \"|<class |environment variable|\bCUDA\b|\bmax_model_len\b",
)
_SENTENCE_RE: Final = re.compile(r"(?<=[.!?])\s+")
# Dumps of a validator: FastAPI's list of dicts, and pydantic's own text.
_DUMP_RE: Final = re.compile(r"\s*\d+ validation errors?\b")
_DUMP_MESSAGE_RE: Final = re.compile(r"""'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")
_PYDANTIC_MESSAGE_RE: Final = re.compile(r"^  (\S[^\n]*?)(?: \[type=[^\n]*)?$", re.MULTILINE)
# What the engine appends to a message of its own validation.
_QUOTED_VALUE_RE: Final = re.compile(r"\s*\(parameter=.*\)\s*\Z", re.DOTALL)
_VALUE_ERROR: Final = ("Value error, ", "Assertion failed, ")


def engine_error(status: int, document: object, path: str) -> SealmeshError:
    """The error behind a document of the engine's OpenAI layer.

    Args:
        status: HTTP status of the answer; an error inside a stream has its own in the document.
        document: decoded body, `{"error": {…}}` or `{"detail": …}`.
        path: the path that was asked.
    """
    error = document.get("error") if isinstance(document, dict) else None
    error = error if isinstance(error, dict) else {}
    if status < 400:
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
    raw = error.get("message")
    raw = raw[:_MAX_RAW_CHARS] if isinstance(raw, str) else ""
    if status >= 500:
        return SealmeshError(
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_FAILED",
            plain_message(raw) or "the engine failed; send the request again",
            retry_after_s=2.0,
        )
    if status == 404 and raw:
        return SealmeshError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            plain_message(raw) or "the worker does not serve this model; GET /v1/models lists what is served",
            field="model",
        )
    if status in (404, 405) or (path == EMBEDDINGS and any(word in raw.lower() for word in _UNSUPPORTED)):
        what = "make embeddings" if path == EMBEDDINGS else f"serve {path}"
        return _refused(f"this model does not {what}; choose another one from GET /v1/models", "model", True)
    param = error.get("param")
    field = param.removeprefix("body.") if isinstance(param, str) and param not in ("", "body") else None
    # What the engine calls the prompt, whatever the request calls it.
    if field in ("input_text", "input_tokens"):
        field = _PROMPTS.get(path)
    if any(phrase in raw for phrase in _TOO_LONG):
        return SealmeshError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "CONTEXT_TOO_LONG",
            plain_message(raw)
            or "the prompt and the answer do not fit the model's context; send less or ask for fewer tokens",
            field=field,
        )
    if _TOOLS_RE.search(raw):
        return _refused(
            "this model is served without a parser for tool calls: set tool_choice to 'none', or ask the "
            "operator to configure a parser",
            "tool_choice",
            True,
        )
    message = plain_message(raw, field)
    unsupported = not message or any(word in message.lower() for word in _UNSUPPORTED)
    return _refused(
        message or "the model does not serve a request like this one; ask the operator", field, unsupported
    )


def plain_message(raw: str, field: str | None = None) -> str:
    """The first thing that a message says, as one line without the engine's internals; "" if none is left.

    Values that a validator quotes are left out, as they may be personal.
    """
    if _DUMP_RE.match(raw):
        found = _DUMP_MESSAGE_RE.search(raw)
        if found is not None:
            said = found[1] if found[1] is not None else found[2]
            text = re.sub(r"\\(['\"\\])", r"\1", said)
        else:
            plain = _PYDANTIC_MESSAGE_RE.search(raw)
            text = plain[1] if plain is not None and not plain[1].startswith("{") else "a field is not valid"
        for prefix in _VALUE_ERROR:
            text = text.removeprefix(prefix)
        if field:
            text = f"{field}: {text}"
    else:
        text = raw
    text = _QUOTED_VALUE_RE.sub("", text)
    line = " ".join(text.replace("\\n", " ").split())
    kept = [sentence for sentence in _SENTENCE_RE.split(line) if not _INTERNAL_RE.search(sentence)]
    line = " ".join(kept)
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def _refused(message: str, field: str | None, unsupported: bool) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        message,
        field=field,
        metadata={OPENAI_CODE: "unsupported" if unsupported else "invalid_value"},
    )
