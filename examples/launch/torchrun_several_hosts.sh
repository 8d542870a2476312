#!/bin/sh
# Several hosts, by hand. On each of them the same, in any order:
#     FIRST_HOST=host0 NUM_HOSTS=2 sh examples/launch/torchrun_several_hosts.sh
# FIRST_HOST is the name of one of the hosts, which all can reach at port 29400; /shared is a file
# system of all of them. With another NUM_HOSTS the run resumes from the last checkpoint.
exec torchrun --nnodes "$NUM_HOSTS" --nproc-per-node gpu \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_HOST:29400" --rdzv-id qwen3 \
    -m model_center train \
    --model-config Qwen/Qwen3-8B --data /shared/chat.jsonl \
    --max-length 4096 --batch-size 2 --lr 1e-5 --epochs 3 \
    --save /shared/runs/qwen3 --resume
