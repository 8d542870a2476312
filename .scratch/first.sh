export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 .scratch/t1.py 3 0 2>&1 | tail -5
python3 .scratch/t1.py 3 1 2>&1 | tail -5
python3 .scratch/t2.py 2>&1 | tail -14
nvidia-smi --query-gpu=name --format=csv; free -g | head -2; nproc
timeout 200 python3 benchmarks/compare.py --gpus 1 --folder $OUT --name gpt2 --run "--backend plain --shape gpt2 --batch 32 8 --compile --steps 10" --run "--backend bmtrain --shape gpt2 --batch 32 8 --compile --steps 10 --profile $OUT/prof.txt" 2>&1 | grep -v -i warn | tail -30
timeout 250 python3 benchmarks/compare.py --gpus 1 --folder $OUT --name offload --run "--backend bmtrain --shape 2.7b --batch 32 --compile --recompute --offload --steps 4 --warmup 2" 2>&1 | grep -v -i warn | tail -30
