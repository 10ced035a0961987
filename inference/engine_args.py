"""vLLM's command line, built from a table: any option of any release passes through."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping

import grpc
from sealmesh.inference.settings import EngineArgument
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["command_line", "parse_engine_args"]


def command_line(arguments: Mapping[str, EngineArgument]) -> list[str]:
    """Flags as `vllm serve` takes them.

    True becomes `--name`, False `--no-name`, None is left out, a table becomes JSON, a list repeated values.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                flags.append(flag)
            case False:
                flags.append("--no-" + flag.removeprefix("--"))
            case dict():
                flags += [flag, json.dumps(value)]
            case list():
                flags += [
                    flag,
                    *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value),
                ]
            case _:
                # In one word, so that a value may begin with a dash.
                flags.append(f"{flag}={value}")
    return flags


def parse_engine_args(arguments: Mapping[str, EngineArgument]) -> Namespace:
    """What vLLM's own parser makes of the table.

    Raises:
        SealmeshError: CONFIGURATION_INVALID: vLLM knows no such option or value.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        # vLLM 0.23, the release that vllm-ascend pairs with.
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM's types are not followed
        def error(self, message: str) -> None:
            raise ValueError(message)

    try:
        parsed: Namespace = make_arg_parser(Parser()).parse_args(command_line(arguments))
    except (ValueError, TypeError) as exc:
        raise SealmeshError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "CONFIGURATION_INVALID",
            f"vLLM does not take worker.engine_args: {exc}",
        ) from None
    return parsed
