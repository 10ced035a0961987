"""Stream an answer over gRPC with the published stubs, `sealmesh.protos`.

Reads SEALMESH_API_KEY, SEALMESH_GRPC and SEALMESH_MODEL.
"""

from __future__ import annotations

import os
import sys

import grpc
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.gateway.v1 import gateway_pb2, gateway_pb2_grpc


def main() -> int:
    """Print the answer as it is made, then why it ended; returns the exit code."""
    key = os.environ.get("SEALMESH_API_KEY")
    if not key:
        print(
            "SEALMESH_API_KEY is not set: set it to your API key "
            "(a local mesh keeps one in .sealmesh/keys/api-key), else ask the operator",
            file=sys.stderr,
        )
        return 2
    metadata = (("authorization", f"Bearer {key}"),)
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    with grpc.insecure_channel(os.environ.get("SEALMESH_GRPC", "127.0.0.1:9090")) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            model = os.environ.get("SEALMESH_MODEL")
            if model is None:
                listed = stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata, timeout=10)
                model = listed.models[0].name.removeprefix("models/")
            request = gateway_pb2.CreateChatCompletionRequest(
                model=f"models/{model}",
                messages=[gateway_pb2.ChatMessage(role=gateway_pb2.ChatMessage.ROLE_USER, content=question)],
                sampling=gateway_pb2.SamplingOptions(max_tokens=64, temperature=0),
            )
            for part in stub.CreateChatCompletion(request, metadata=metadata, timeout=120):
                if part.HasField("delta"):
                    print(part.delta.content, end="", flush=True)
                else:
                    reason = types_pb2.FinishReason.Name(part.finish.reason)
                    print(f"\n[{reason}, {part.finish.usage.completion_tokens} tokens]")
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
