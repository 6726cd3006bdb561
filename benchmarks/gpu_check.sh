#!/bin/sh
# What a GPU must show, in under 8 minutes: embedded engine and trainer with random weights, then, where there is a vLLM
# for it, swaps under load. PYTHON and VLLM_PYTHON name other interpreters, OUT another folder for the figures.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
vllm=${VLLM_PYTHON:-.venv/vllm/bin/python}
out=${OUT:-.}
PYTHONPATH="$PWD/backends:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

echo "== embedded engine and trainer"
timeout 300 "$python" benchmarks/gpu_check.py --json "$out/gpu_check.json" "$@"

if [ -x "$vllm" ] && "$vllm" -c 'import torch, vllm, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
  echo "== vLLM: swaps under load"
  timeout 170 "$python" benchmarks/swap.py --quick --python "$vllm" --json "$out/swap.json"
else
  echo "== vLLM: NOT RUN: $vllm is no interpreter with a vLLM that sees a GPU"
fi
