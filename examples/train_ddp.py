"""Train on several processes with PyTorch's DistributedDataParallel; goes on from FILE.

Usage: KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/train_ddp.py STEPS FILE
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keras_tinygpt as tg

steps, path, rows, length = int(sys.argv[1]), sys.argv[2], 8, 32
dist.init_process_group("gloo")
rank, size, done = dist.get_rank(), dist.get_world_size(), 0
if rows % size:
    sys.exit(f"processes must divide {rows}, got {size}")
ids = tg.encode_corpus(tg.load_corpus("five-nights"), tg.ByteTokenizer())
starts = tg.window_schedule(len(ids), length, steps, rows)
model = DistributedDataParallel(tg.build_gpt(tg.GPTConfig.preset("book", 256)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
if os.path.exists(path):
    done, weights, moments = torch.load(path)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
for inputs, targets in tg.WindowDataset(ids, starts[done:, rank::size], length):
    logits = model(torch.as_tensor(inputs))  # (B / size, T, V)
    loss = torch.nn.functional.cross_entropy(logits.mT, torch.as_tensor(targets).long())
    optimizer.zero_grad()
    loss.backward()  # averages the gradients over the processes
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(mean := loss.detach() / size)
    print(f"loss {mean:.6f}\n" if rank == 0 else "", end="", flush=True)
if rank == 0:
    torch.save([steps, model.state_dict(), optimizer.state_dict()], path)
dist.destroy_process_group()
