"""`sealmesh chat` and `sealmesh models`: the OpenAI API of the gateway from the command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.client import (
    ApiKeyFileOption,
    Gateway,
    UrlOption,
    find_gateway,
    refused,
    unreachable,
)
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    import httpx

CHAT_EPILOG = """
Examples:\n
  sealmesh chat "What is the capital of France?"\n
  sealmesh chat                         a conversation; Ctrl-D ends it\n
  git diff | sealmesh chat --system "Write a commit message" -\n
"""
MODELS_EPILOG = """
Examples:\n
  sealmesh models --json | jq -r '.[].id'\n
"""


@dataclass
class Answer:
    """One answer, as far as it has come."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, object] = field(default_factory=dict)
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class _Options:
    model: str
    max_tokens: int | None
    temperature: float | None
    seed: int | None

    def body(self, messages: list[dict[str, str]]) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in ("max_tokens", "temperature", "seed"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        return body


def chat(
    text: Annotated[
        str | None, typer.Argument(help="What to say; - reads standard input; nothing starts a conversation.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the first that is served.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="Instructions to the model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show tokens, cached ones too, and times.")
    ] = False,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Talk to the model through the gateway; the answer is streamed.

    Exit codes: 0 answered, 1 failed or cut off, 2 wrong request, 3 refused (key, policy).
    """
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    gateway = find_gateway(find_state(state_dir), url, api_key_file)
    if text == "-":
        text = sys.stdin.read()
    if text is not None and not text.strip():
        raise CommandError("there is nothing to say: the text is empty", Exit.USAGE)
    messages = [{"role": "system", "content": system}] if system else []
    with gateway.client() as client:
        chosen = model or list_models(client, gateway)[0]["id"]
        options = _Options(str(chosen), max_tokens, temperature, seed)
        if text is None:
            _converse(client, gateway, options, messages, terminal, verbose=verbose)
            return
        messages.append({"role": "user", "content": text})
        answer = Answer()
        for piece in stream_answer(client, gateway, options.body(messages), answer):
            if not as_json:
                _write(piece)
    if as_json:
        terminal.json(
            {
                "model": chosen,
                "content": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "first_token_s": answer.first_token_s,
                "total_s": answer.total_s,
            }
        )
        return
    _write("\n")
    if verbose:
        terminal.note(describe(answer))


def models(
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models that the gateway serves."""
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    gateway = find_gateway(find_state(state_dir), url, api_key_file)
    with gateway.client() as client:
        found = list_models(client, gateway)
    if as_json:
        terminal.json(found)
        return
    table = plain_table("Model", "Context")
    for entry in found:
        table.add_row(escape(str(entry["id"])), str(entry.get("max_model_len", "")))
    terminal.out.print(table)


def list_models(client: httpx.Client, gateway: Gateway) -> list[dict[str, object]]:
    """Entries of /v1/models, at least one. Raises CommandError."""
    import httpx

    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise unreachable(gateway, error) from error
    if response.status_code != httpx.codes.OK:
        raise refused(response.status_code, response.content)
    entries = response.json().get("data", [])
    if not entries:
        raise CommandError(f"{gateway.url} serves no model now; see `sealmesh status`")
    return [dict(entry) for entry in entries]


def stream_answer(
    client: httpx.Client, gateway: Gateway, body: dict[str, object], answer: Answer
) -> Iterator[str]:
    """Pieces of the answer's text as they come; `answer` is complete at the end.

    Raises CommandError when the gateway refuses, or the stream breaks off before its end mark.
    """
    import httpx

    started = time.monotonic()
    ended = False
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise refused(response.status_code, response.read())
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    ended = True
                    break
                if not data:
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise refused(int(chunk["error"].get("code") or 500), data.encode())
                answer.usage = chunk.get("usage") or answer.usage
                for choice in chunk.get("choices", ()):
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece:
                        if answer.first_token_s is None:
                            answer.first_token_s = time.monotonic() - started
                        answer.text += piece
                        yield piece
    except httpx.HTTPError as error:
        raise unreachable(gateway, error) from error
    except ValueError as error:
        raise CommandError(f"{gateway.url} sent something that is not the OpenAI API: {error}") from error
    finally:
        answer.total_s = time.monotonic() - started
    if not ended:
        raise CommandError("the answer was cut off: the stream ended before its end mark")


def describe(answer: Answer) -> str:
    """Tokens and times in one line."""
    usage = answer.usage
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    first = "" if answer.first_token_s is None else f", first token after {answer.first_token_s:.2f} s"
    return (
        f"{usage.get('prompt_tokens', '?')} prompt tokens ({cached or 0} cached), "
        f"{usage.get('completion_tokens', '?')} answer tokens, finish {answer.finish_reason or '?'}"
        f"{first}, {answer.total_s:.2f} s in all"
    )


def _converse(
    client: httpx.Client,
    gateway: Gateway,
    options: _Options,
    messages: list[dict[str, str]],
    terminal: Terminal,
    *,
    verbose: bool,
) -> None:
    terminal.note(f"{options.model} at {gateway.url}. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            _write("\n")
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            for piece in stream_answer(client, gateway, options.body(messages), answer):
                _write(piece)
        except KeyboardInterrupt:
            terminal.note("\n(stopped)")
        except CommandError as error:
            terminal.error(str(error))
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()
        _write("\n")
        if verbose:
            terminal.note(describe(answer))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
