#!/usr/bin/env bash
# Makes an environment with clients of OpenAI's API, asks the server with each, and compares their figures with ours:
#   bash scripts/clients.sh openai langchain litellm agents aiperf guidellm lm_eval evaluate, or: all
# evaluate is that of vllm-project/speculators, which no package has. Settings: VENV (folder of the environment, default
# .venv/clients), SPECULATORS (folder scripts/evaluate of its checkout; without it `all` leaves it out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
VENV="${VENV:-.venv/clients}"
declare -A packages=([openai]="openai==3.57.0" [langchain]="langchain-openai==1.7.4"
    [litellm]="litellm==1.110.2" [agents]="openai-agents==0.24.0" [aiperf]="aiperf==0.13.0" [guidellm]="guidellm==0.8.1 torch==2.13.0"
    [lm_eval]="lm-eval[api]==0.4.13 transformers jinja2" [evaluate]="guidellm==0.8.1 torch==2.13.0")
declare -A modules=([openai]=openai [langchain]=langchain_openai [litellm]=litellm [agents]=agents [aiperf]=aiperf [guidellm]=guidellm [lm_eval]="lm_eval, tenacity, transformers" [evaluate]="guidellm, speculators")

clients=("$@")
if [ "$*" = all ]; then
    clients=(openai langchain litellm agents aiperf guidellm lm_eval)
    if [ -n "${SPECULATORS:-}" ]; then clients+=(evaluate); fi
fi
for client in "${clients[@]:-none}"; do
    if [ -z "${packages[$client]:-}" ]; then
        echo "error: clients: got '$client'; allowed: all, or some of ${!packages[*]}" >&2
        exit 2
    fi
done
use_python "$IMPORTS, fastapi, uvicorn, prometheus_client, llguidance" -r requirements.txt -r requirements-test.txt
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
for client in "${clients[@]}"; do
    if ! has_imports "$VENV/bin/python" "${modules[$client]}"; then
        # shellcheck disable=SC2086 # several words
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check ${packages[$client]} >&2
        # It asks for builds for CUDA, which are for training.
        [ "$client" != evaluate ] || "$VENV/bin/python" -m pip install --quiet --no-deps \
            speculators==0.9.0 hs-connectors==0.9.0 >&2
    fi
done
exec "$PYTHON" -m tests.clients.run "${clients[@]}" --folder "$VENV/bin" ${SPECULATORS:+--speculators "$SPECULATORS"}
