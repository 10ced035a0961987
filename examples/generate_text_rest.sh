#!/bin/sh
# The native REST surface: the RPC GatewayService.GenerateText, and the privacy filter alone.
# Streams newline-delimited JSON; with "Accept: text/event-stream" server-sent events.
# Reads SEALMESH_API_KEY, SEALMESH_URL and SEALMESH_MODEL.
set -eu
url=${SEALMESH_URL:-http://127.0.0.1:8080}
model=${SEALMESH_MODEL:-smollm2-135m-instruct}
key=${SEALMESH_API_KEY:?set SEALMESH_API_KEY to the key that "sealmesh up" printed}

call() {
    curl --fail-with-body -sSN "$url/api/v1/$1" \
        -H "Authorization: Bearer $key" \
        -H "Content-Type: application/json" \
        -d "$2"
    echo
}

call "models/$model:generateText" \
    '{"prompt": "The capital of France is", "sampling": {"maxTokens": 8, "temperature": 0}}'
call "text:mask" '{"text": "我的手机是13800138000"}'
