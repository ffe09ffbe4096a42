#!/bin/sh
# Two turns of a conversation, and where their KV came from, with nothing but curl.
#
#     kvortex serve MODEL
#     examples/curl.sh                                   # or with URL=http://host:8000 VLLM_API_KEY=...
#
set -eu
URL=${URL:-http://localhost:8000}

# The key goes in by standard input: every user of the machine can read a command line.
ask() {
    path=$1
    shift
    printf 'Authorization: Bearer %s\n' "${VLLM_API_KEY:-none}" |
        curl --silent --show-error --fail-with-body -H @- "$@" "$URL$path"
    echo
}

# X-Session-Id names the conversation, for a server that prefetches. Blocks are found by content, with or without it.
chat() {
    ask /v1/chat/completions -H 'Content-Type: application/json' -H "X-Session-Id: curl-$$" -d "$1"
}

question='{"role": "user", "content": "What is a cache good for?"}'
answer='{"role": "assistant", "content": "It keeps at hand what is asked for again."}'

chat "{\"max_tokens\": 24, \"messages\": [$question]}"
chat "{\"max_tokens\": 24, \"messages\": [$question, $answer, {\"role\": \"user\", \"content\": \"And when is it of no use?\"}]}"

# Is the cache helping? The same in words: kvortex inspect --url "$URL"
ask /kvortex/stats
