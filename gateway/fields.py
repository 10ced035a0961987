"""Which fields of an OpenAI request may reach a worker.

An allow-list for the engine releases that sealmesh runs (vLLM 0.23 to 0.32). What the PII filter cannot
read, and what would let a caller steer the engine, is refused by name; what only describes the caller or
would collide with what the gateway itself sets is left out silently, as documented here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import grpc
from sealmesh.gateway.field_types import MESSAGE_TYPES, ROLES, wrong_type
from sealmesh.telemetry.runtime.errors import SealmeshError

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, Json]

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"

# Answers to one request, unless the operator sets another limit.
MAX_CHOICES: Final = 16

_SAMPLING: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_beam_search",
        "add_special_tokens",
        "echo",
    }
)
_ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    CHAT_COMPLETIONS: _SAMPLING
    | {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "include_reasoning",
        "max_completion_tokens",
        "messages",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "top_logprobs",
    },
    COMPLETIONS: _SAMPLING | {"prompt", "suffix"},
    EMBEDDINGS: frozenset(
        {"add_special_tokens", "dimensions", "encoding_format", "input", "model", "truncate_prompt_tokens"}
    ),
}
# Left out: they name the caller, belong to OpenAI's own platform, or are set by the gateway.
_STRIPPED: Final = frozenset(
    {
        "cache_salt",
        "ec_transfer_params",
        "kv_transfer_params",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)
_REFUSED: Final[Mapping[str, str]] = {
    "best_of": "not served; ask for n answers and choose among them",
    "prompt_embeds": "the privacy filter cannot read embeddings",
    "documents": "the privacy filter does not read documents; put their text into messages",
    "chat_template": "the model's own chat template is used",
    "media_io_kwargs": "media are not served",
    "mm_processor_kwargs": "media are not served",
    "audio": "media are not served",
    "modalities": "media are not served",
    "prediction": "not served",
    "priority": "the gateway decides the order of requests",
    "vllm_xargs": "callers may not steer the engine",
}
# Template switches without text in them.
_TEMPLATE_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})
_MESSAGE_FIELDS: Final = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "reasoning",
        "reasoning_content",
        "refusal",
    }
)
_MESSAGE_STRIPPED: Final = frozenset({"annotations", "cache_control", "provider_specific_fields"})
_PART_TEXT: Final[Mapping[str, str]] = {"text": "text", "refusal": "refusal", "input_text": "text"}


def admit(path: str, body: JsonObject, *, max_choices: int = MAX_CHOICES) -> JsonObject:
    """The part of ``body`` that may go on to the filter and the worker; ``body`` is not changed.

    Args:
        path: one of the path constants of this module.
        body: decoded request body.
        max_choices: largest `n`; each answer takes a sequence of the engine.

    Raises:
        SealmeshError: FIELD_REFUSED names the field; INVALID_REQUEST for a wrong type or a missing field.
    """
    allowed = _ALLOWED[path]
    admitted: JsonObject = {}
    for name, value in body.items():
        if name in allowed:
            what = wrong_type(name, value)
            if what is not None:
                raise invalid(f"{name} must be {what}", name)
            admitted[name] = value
        elif value is not None and name not in _STRIPPED:
            raise refused(name, _REFUSED.get(name, f"{path} does not know it"))
    if path == CHAT_COMPLETIONS:
        _admit_chat(admitted)
    elif path == COMPLETIONS:
        _admit_text(admitted, "prompt")
    else:
        _admit_text(admitted, "input")
    model = admitted.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("you must give the name of a model", "model")
    choices = admitted.get("n")
    if isinstance(choices, int | float) and not 1 <= choices <= max_choices:
        raise invalid(f"n must be from 1 to {max_choices} (the gateway's max_choices)", "n")
    return admitted


def refused(field: str, why: str) -> SealmeshError:
    """FIELD_REFUSED for one field."""
    return SealmeshError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_REFUSED",
        f"field {field!r} is refused: {why}; leave it out",
        field=field,
    )


def invalid(message: str, field: str | None = None) -> SealmeshError:
    """INVALID_REQUEST, with the field at fault if there is one."""
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field=field)


def _admit_text(body: JsonObject, field: str) -> None:
    value = body.get(field)
    if isinstance(value, str):
        return
    if value is None:
        raise invalid(f"{field} must be given", field)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if not value:
            raise invalid(f"{field} is an empty list", field)
        return
    if isinstance(value, list) and all(isinstance(item, int | list) for item in value):
        raise refused(field, "the privacy filter cannot read token ids; send text")
    raise invalid(f"{field} must be a string or a list of strings", field)


def _admit_chat(body: JsonObject) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of at least one message", "messages")
    body["messages"] = [
        _admit_message(message, f"messages[{position}]") for position, message in enumerate(messages)
    ]
    switches = body.get("chat_template_kwargs")
    if switches is None:
        body.pop("chat_template_kwargs", None)
    elif not isinstance(switches, dict) or any(
        name not in _TEMPLATE_SWITCHES or not isinstance(value, bool) for name, value in switches.items()
    ):
        raise refused(
            "chat_template_kwargs",
            f"only true or false for {' and '.join(sorted(_TEMPLATE_SWITCHES))} is passed on",
        )


def _admit_message(message: Json, where: str) -> Json:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", where)
    if message.get("role") not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    admitted: JsonObject = {}
    for name, value in message.items():
        if name in _MESSAGE_FIELDS:
            what = wrong_type(name, value, MESSAGE_TYPES)
            if what is not None:
                raise invalid(f"{where}.{name} must be {what}", f"{where}.{name}")
            admitted[name] = value
        elif value is not None and name not in _MESSAGE_STRIPPED:
            raise refused(f"{where}.{name}", "messages have no such field here")
    content = admitted.get("content")
    if isinstance(content, list):
        admitted["content"] = [
            _admit_part(part, f"{where}.content[{position}]") for position, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise invalid(f"{where}.content must be a string or a list of parts", f"{where}.content")
    return admitted


def _admit_part(part: Json, where: str) -> Json:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(f"{where} must be an object", where)
    kind = part.get("type")
    text_field = _PART_TEXT.get(kind) if isinstance(kind, str) else None
    if text_field is None:
        raise refused(f"{where}.type", "only text is served; the privacy filter cannot read other media")
    if not isinstance(part.get(text_field), str):
        raise invalid(f"{where}.{text_field} must be a string", f"{where}.{text_field}")
    # Anything else in a part (image_url beside type "text", cache_control) is left out.
    return {"type": kind, text_field: part[text_field]}
