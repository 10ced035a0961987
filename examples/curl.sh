#!/bin/sh
# A chat with nothing but curl: once whole, once streamed.
# Reads SEALMESH_API_KEY, SEALMESH_URL and SEALMESH_MODEL.
set -eu
url=${SEALMESH_URL:-http://127.0.0.1:8080}
model=${SEALMESH_MODEL:-smollm2-135m-instruct}
key=${SEALMESH_API_KEY:?set SEALMESH_API_KEY to the key that "sealmesh up" printed}

ask() {
    curl --fail-with-body -sSN "$url/v1/chat/completions" \
        -H "Authorization: Bearer $key" \
        -H "Content-Type: application/json" \
        -d "{\"model\": \"$model\", \"max_tokens\": 32, \"stream\": $1,
             \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}"
    echo
}

ask false
ask true
