"""What one masked request leaves behind: the way back for its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sealmesh.gateway.pii.placeholders import RestoreTable
from sealmesh.gateway.pii.restorer import Restorer
from sealmesh.gateway.pii.spans import Finding

Json = dict[str, object]

# Text that an answer carries, in a message or a delta.
_TEXT_FIELDS = ("reasoning_content", "reasoning", "content", "refusal")


class PiiSession:
    """The restore table of one request, and what was found in it. Dies with the request.

    `masked` is False when nothing was replaced: every method then hands its argument through untouched, so
    that callers may forward bytes without parsing them.
    """

    def __init__(self, table: RestoreTable, findings: Sequence[Finding]) -> None:
        self._table = table
        self.findings = tuple(findings)
        self.counts: dict[str, int] = dict(Counter(finding.type for finding in self.findings))

    @property
    def masked(self) -> bool:
        """Whether the answer needs restoring."""
        return bool(self._table)

    def restorer(self, *, json_escaped: bool = False) -> Restorer:
        """A restorer for one text of the answer; `json_escaped` for tool arguments."""
        return Restorer(self._table, json_escaped=json_escaped)

    def restore_text(self, text: str, *, json_escaped: bool = False) -> str:
        """Restores a whole text."""
        restorer = self.restorer(json_escaped=json_escaped)
        return restorer.feed(text) + restorer.flush()

    def restore_unary(self, response: Json) -> Json:
        """The response of /v1/chat/completions or /v1/completions with the values back in it.

        Logprobs, token ids, prompt echoes and usage stay as the model saw them. The argument is not changed.
        """
        choices = response.get("choices")
        if not self.masked or not isinstance(choices, list):
            return response
        return {**response, "choices": [self._choice(choice) for choice in choices]}

    def stream(self) -> StreamRestorer:
        """A restorer for the chunks of one streamed answer."""
        return StreamRestorer(self)

    def _choice(self, choice: object) -> object:
        if not isinstance(choice, dict):
            return choice
        fresh = dict(choice)
        if isinstance(text := choice.get("text"), str):
            fresh["text"] = self.restore_text(text)
        if isinstance(message := choice.get("message"), dict):
            fresh["message"] = self._message(message)
        return fresh

    def _message(self, message: Json) -> Json:
        fresh = dict(message)
        for name in _TEXT_FIELDS:
            if isinstance(text := message.get(name), str):
                fresh[name] = self.restore_text(text)
        if isinstance(parts := message.get("content"), list):
            fresh["content"] = [self._part(part) for part in parts]
        if isinstance(call := message.get("function_call"), dict):
            fresh["function_call"] = self._function(call)
        if isinstance(calls := message.get("tool_calls"), list):
            fresh["tool_calls"] = [
                {**call, "function": self._function(call["function"])}
                if isinstance(call, dict) and isinstance(call.get("function"), dict)
                else call
                for call in calls
            ]
        return fresh

    def _part(self, part: object) -> object:
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            return {**part, "text": self.restore_text(text)}
        return part

    def _function(self, function: Json) -> Json:
        if isinstance(arguments := function.get("arguments"), str):
            return {**function, "arguments": self.restore_text(arguments, json_escaped=True)}
        return function


class StreamRestorer:
    """Restores the chunks of one streamed answer, each choice, text field and tool call on its own.

    A chunk goes out for every chunk that comes in. What a channel still holds goes out with the chunk in
    which its choice finishes or turns to another field, or from `close` when the stream ends without a
    finish reason.
    """

    def __init__(self, session: PiiSession) -> None:
        self._session = session
        self._channels: dict[int, dict[tuple[str, int], Restorer]] = {}
        self._frame: Json = {}

    def feed(self, chunk: Json) -> Json:
        """The chunk to send on. The argument is not changed."""
        choices = chunk.get("choices")
        if not self._session.masked or not isinstance(choices, list) or not choices:
            return chunk
        self._frame = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
        return {**chunk, "choices": [self._choice(choice) for choice in choices]}

    def close(self) -> Json | None:
        """What is still held, as a last chunk without a finish reason; None when nothing is."""
        choices: list[object] = []
        for index, channels in self._channels.items():
            choice: Json = {"index": index}
            if ("text", 0) in channels:
                choice["text"] = ""
            else:
                choice["delta"] = {}
            if self._drain(choice, channels, keep=None):
                choices.append({**choice, "finish_reason": None})
        return {**self._frame, "choices": choices} if choices else None

    def _choice(self, choice: object) -> object:
        if not isinstance(choice, dict):
            return choice
        index = choice.get("index", 0)
        channels = self._channels.setdefault(index if isinstance(index, int) else 0, {})
        fresh = dict(choice)
        active: set[tuple[str, int]] = set()
        if isinstance(text := choice.get("text"), str):
            fresh["text"] = self._restorer(channels, "text", 0).feed(text)
            active.add(("text", 0))
        if isinstance(delta := choice.get("delta"), dict):
            fresh["delta"] = self._delta(delta, channels, active)
        if choice.get("finish_reason") is not None:
            self._drain(fresh, channels, keep=None)
        elif active:
            self._drain(fresh, channels, keep=active)
        return fresh

    def _delta(
        self, delta: Json, channels: dict[tuple[str, int], Restorer], active: set[tuple[str, int]]
    ) -> Json:
        fresh = dict(delta)
        for name in _TEXT_FIELDS:
            text = delta.get(name)
            if isinstance(text, str) and text:
                fresh[name] = self._restorer(channels, name, 0).feed(text)
                active.add((name, 0))
        if isinstance(call := delta.get("function_call"), dict) and isinstance(
            arguments := call.get("arguments"), str
        ):
            fresh["function_call"] = {
                **call,
                "arguments": self._restorer(channels, "function_call", 0).feed(arguments),
            }
            active.add(("function_call", 0))
        if isinstance(calls := delta.get("tool_calls"), list):
            fresh["tool_calls"] = [self._call(call, channels, active) for call in calls]
        return fresh

    def _call(
        self, call: object, channels: dict[tuple[str, int], Restorer], active: set[tuple[str, int]]
    ) -> object:
        if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
            return call
        if not isinstance(arguments := function.get("arguments"), str):
            return call
        index = call.get("index", 0)
        key = ("tool_calls", index if isinstance(index, int) else 0)
        active.add(key)
        restored = self._restorer(channels, *key).feed(arguments)
        return {**call, "function": {**function, "arguments": restored}}

    def _restorer(self, channels: dict[tuple[str, int], Restorer], name: str, index: int) -> Restorer:
        restorer = channels.get((name, index))
        if restorer is None:
            restorer = self._session.restorer(json_escaped=name in ("function_call", "tool_calls"))
            channels[name, index] = restorer
        return restorer

    def _drain(
        self,
        choice: Json,
        channels: dict[tuple[str, int], Restorer],
        keep: set[tuple[str, int]] | None,
    ) -> bool:
        """Flushes every channel but those to keep into the choice; whether anything came out."""
        any_text = False
        for (name, index), restorer in channels.items():
            if keep is not None and (name, index) in keep:
                continue
            rest = restorer.flush()
            if not rest:
                continue
            any_text = True
            if name == "text":
                choice["text"] = f"{choice.get('text') or ''}{rest}"
                continue
            delta = choice.get("delta")
            delta = dict(delta) if isinstance(delta, dict) else {}
            choice["delta"] = delta
            if name == "tool_calls":
                delta["tool_calls"] = _append_arguments(delta.get("tool_calls"), index, rest)
            elif name == "function_call":
                call = delta.get("function_call")
                call = dict(call) if isinstance(call, dict) else {}
                call["arguments"] = f"{call.get('arguments') or ''}{rest}"
                delta["function_call"] = call
            else:
                delta[name] = f"{delta.get(name) or ''}{rest}"
        return any_text


def _append_arguments(calls: object, index: int, rest: str) -> list[object]:
    """Tool-call deltas in which call `index` carries `rest` at the end of its arguments."""
    fresh: list[object] = list(calls) if isinstance(calls, list) else []
    for position, call in enumerate(fresh):
        if isinstance(call, dict) and call.get("index", 0) == index:
            function = call.get("function")
            function = dict(function) if isinstance(function, dict) else {}
            function["arguments"] = f"{function.get('arguments') or ''}{rest}"
            fresh[position] = {**call, "function": function}
            return fresh
    # Before the calls that this chunk begins: it belongs to one that came earlier.
    fresh.insert(0, {"index": index, "function": {"arguments": rest}})
    return fresh
