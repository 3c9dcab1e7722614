#!/bin/sh
# What a container of lora_fp8 runs: the page, or the command that is given. The volume /data holds all that should stay.
set -eu

if ! touch /data/.writable 2>/dev/null; then
    echo "/data cannot be written by user $(id -u): chown it to $(id -u):$(id -g), or start the container with --user" >&2
    exit 2
fi
rm -f /data/.writable
mkdir -p /data/runs /data/datasets /data/models
cd /data

# "docker stop" sends SIGTERM here alone. Passed on to all, it makes a trainer finish its step and save; its job goes on
# from there when the container starts again.
leave() {
    kill -TERM -1 2>/dev/null || true
    waited=0
    while [ "$waited" -lt "${LORA_FP8_STOP_SECONDS:-100}" ] && pgrep -f lora_fp8.jobs.keeper >/dev/null; do
        sleep 1
        waited=$((waited + 1))
    done
    exit 0
}

if [ $# -eq 0 ]; then
    set -- lora-fp8 ui --host 0.0.0.0 --port 7860 --user "${LORA_FP8_USER:-me}" \
        --root /data/runs --root /data/datasets --root /data/models
    if [ -n "${RUNPOD_POD_ID:-}" ]; then
        set -- "$@" --name "$RUNPOD_POD_ID-7860.proxy.runpod.net"
    fi
    for name in ${LORA_FP8_NAMES:-}; do
        set -- "$@" --name "$name"
    done
fi
"$@" &
child=$!
trap leave TERM INT
wait "$child"
