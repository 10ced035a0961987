"""The types of request fields that hold no text for the model.

A string in the place of a number would pass the privacy filter's reading of settings and come back in an
error of the engine, so a wrong type is refused here, by name and without quoting the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

Check: TypeAlias = Callable[[object], bool]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: object) -> bool:
    # Some clients write 5.0 for 5, and engines take it.
    return _number(value) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _boolean(value: object) -> bool:
    return isinstance(value, bool)


def _null(value: object) -> bool:
    return value is None


def _string(value: object) -> bool:
    return isinstance(value, str)


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _integers(value: object) -> bool:
    return _list_of(_integer)(value)


def _strings(value: object) -> bool:
    return _list_of(_string)(value)


def _objects(value: object) -> bool:
    return _list_of(_object)(value)


def _either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def _object_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


def _one_of(*names: str) -> Check:
    return lambda value: isinstance(value, str) and value in names


def _all(names: str, check: Check, what: str) -> Iterable[tuple[str, tuple[Check, str]]]:
    return ((name, (check, what)) for name in names.split())


# Field -> (check, what it must be). Null says nothing and is let through.
TYPES: Final[Mapping[str, tuple[Check, str]]] = dict(
    [
        *_all(
            "frequency_penalty length_penalty min_p presence_penalty repetition_penalty temperature "
            "thinking_token_budget top_p",
            _number,
            "a number",
        ),
        *_all(
            "dimensions max_completion_tokens max_tokens min_tokens n prompt_logprobs seed stream_interval "
            "top_k top_logprobs truncate_prompt_tokens",
            _integer,
            "a whole number",
        ),
        *_all(
            "add_generation_prompt add_special_tokens continue_final_message echo ignore_eos "
            "include_reasoning include_stop_str_in_output parallel_tool_calls return_token_ids "
            "return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stream "
            "use_beam_search",
            _boolean,
            "true or false",
        ),
        *_all("allowed_token_ids logprob_token_ids stop_token_ids", _integers, "a list of whole numbers"),
        *_all("reasoning_effort suffix", _string, "a string"),
        *_all("repetition_detection response_format structured_outputs", _object, "an object"),
        ("bad_words", (_strings, "a list of strings")),
        ("encoding_format", (_one_of("float", "base64"), "'float' or 'base64'")),
        ("logit_bias", (_object_of(_number), "an object of numbers")),
        ("logprobs", (_either(_boolean, _integer), "true, false or a whole number")),
        ("stop", (_either(_string, _strings), "a string or a list of strings")),
        ("stream_options", (_object_of(_either(_boolean, _null)), "an object of true and false")),
        ("tool_choice", (_either(_string, _object), "a string or an object")),
        ("tools", (_objects, "a list of objects")),
        ("truncation_side", (_one_of("left", "right"), "'left' or 'right'")),
    ]
)
MESSAGE_TYPES: Final[Mapping[str, tuple[Check, str]]] = dict(
    [
        *_all("name reasoning reasoning_content refusal tool_call_id", _string, "a string"),
        ("function_call", (_object, "an object")),
        ("tool_calls", (_objects, "a list of objects")),
    ]
)
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def wrong_type(name: str, value: object, types: Mapping[str, tuple[Check, str]] = TYPES) -> str | None:
    """What the field must be, when ``value`` is something else; None when the type is right or not fixed."""
    if value is None or name not in types:
        return None
    check, what = types[name]
    return None if check(value) else what
