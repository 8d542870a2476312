#!/bin/sh
# One host, a process for each of its GPUs:
#     sh examples/launch/torchrun_one_host.sh
# Run it again after Ctrl-C or a crash: it resumes from the last checkpoint.
exec torchrun --standalone --nproc-per-node gpu \
    -m model_center train \
    --model-config Qwen/Qwen3-8B --data /shared/chat.jsonl \
    --max-length 4096 --batch-size 2 --lr 1e-5 --epochs 3 \
    --save /shared/runs/qwen3 --resume
