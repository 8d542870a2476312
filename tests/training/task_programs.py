"""Fine-tuning and pre-training programs as users of ModelCenter write them: its imports, its flags,
the calls of its examples in their order, and nothing of ours.

A program is a text. What all have in common stands once, in `COMMON`.
"""

COMMON = """
import os
import random

import numpy as np
import torch

import bmtrain as bmt
from model_center import get_args
from model_center.dataset import DistributedDataLoader, MMapIndexedDataset
from model_center.layer import Linear
from model_center.utils import print_inspect


def initialize():
    args = get_args()
    bmt.init_distributed(seed=args.seed)
    if args.save is not None:
        os.makedirs(args.save, exist_ok=True)
    return args


def get_schedule(args, optimizer):
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters * args.epochs
    kinds = {
        "noam": bmt.lr_scheduler.Noam,
        "constant": bmt.lr_scheduler.NoDecay,
        "linear": bmt.lr_scheduler.Linear,
        "exponential": bmt.lr_scheduler.Exponential,
        "cosine": bmt.lr_scheduler.Cosine,
    }
    return kinds[args.lr_decay_style](
        optimizer,
        start_lr=args.lr,
        warmup_iter=args.warmup_iters,
        end_iter=args.lr_decay_iters,
        num_iter=args.start_step,
    )


def get_optimizer(args, model):
    bmt.synchronize()
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=args.weight_decay)
    schedule = get_schedule(args, optimizer)
    bmt.synchronize()
    bmt.print_rank("Model mem\\n", torch.cuda.memory_summary())
    bmt.synchronize()
    return optimizer, schedule


def get_manager(args, optimizer, schedule, **options):
    manager = bmt.optim.OptimManager(loss_scale=args.loss_scale, **options)
    manager.add_optimizer(optimizer, schedule)
    return manager


def step(args, manager, optimizer, schedule, loss, epoch, it, total):
    global_loss = bmt.sum_loss(loss).item()
    manager.zero_grad()
    manager.backward(loss)
    grad_norm = manager.clip_grad_norm(optimizer.param_groups, args.clip_grad, norm_type=2)
    manager.step()
    bmt.print_rank(
        "train | epoch {:3d} | Iter: {:6d}/{:6d} | loss: {:.6f} | lr: {:.4e}, scale: {:10.4f} | "
        "grad_norm: {:.4f} |".format(
            epoch, it, total, global_loss, schedule.current_lr, int(manager.loss_scale), grad_norm
        )
    )


def loaders(dataset, args):
    return {
        "train": DistributedDataLoader(dataset["train"], batch_size=args.batch_size, shuffle=True),
        "dev": DistributedDataLoader(dataset["dev"], batch_size=args.batch_size, shuffle=False),
    }


def gathered(values):
    return bmt.gather_result(torch.tensor(values).int()).cpu().tolist()


def report(args, split, epoch, gt, pd):
    from sklearn.metrics import accuracy_score, f1_score, recall_score
    pd, gt = gathered(pd), gathered(gt)
    bmt.print_rank(f"{split} epoch {epoch} rows {len(gt)} accuracy: {accuracy_score(gt, pd) * 100:.2f}")
    if args.dataset_name == "CB":
        bmt.print_rank(f"macro F1: {f1_score(gt, pd, average='macro') * 100:.2f}")
        bmt.print_rank(f"recall: {recall_score(gt, pd, average='macro') * 100:.2f}")
"""

BERT = """
from model_center.model import Bert
from model_center.tokenizer import BertTokenizer
from model_center.dataset.bertdataset import DATASET


class BertModel(torch.nn.Module):
    def __init__(self, args, num_types):
        super().__init__()
        self.bert = Bert.from_pretrained(args.model_config)
        dim_model = self.bert.input_embedding.weight.shape[1]
        self.dense = Linear(dim_model, num_types)
        bmt.init_parameters(self.dense)

    def forward(self, *args, **kwargs):
        pooler_output = self.bert(*args, **kwargs, output_pooler_output=True).pooler_output
        return self.dense(pooler_output)


def scores(args, model, data):
    if args.dataset_name == "COPA":
        each = [
            model(
                data[f"input_ids{choice}"],
                attention_mask=data[f"attention_mask{choice}"],
                token_type_ids=data[f"token_type_ids{choice}"],
            )
            for choice in "01"
        ]
        return torch.cat(each, dim=1)
    return model(
        data["input_ids"],
        attention_mask=data["attention_mask"],
        token_type_ids=data["token_type_ids"],
    )


args = initialize()
tokenizer = BertTokenizer.from_pretrained(args.model_config)
model = BertModel(args, {"BoolQ": 2, "CB": 3, "COPA": 1, "RTE": 2, "WiC": 2}[args.dataset_name])
optimizer, schedule = get_optimizer(args, model)
dataset = {
    split: DATASET[args.dataset_name](
        f"{args.base_path}/down_data/superglue/", split, bmt.rank(), bmt.world_size(), tokenizer,
        args.max_encoder_length,
    )
    for split in ["train", "dev", "test"]
}
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule)
print_inspect(model, "*")
for epoch in range(args.epochs):
    dataloader = loaders(dataset, args)
    model.train()
    for it, data in enumerate(dataloader["train"]):
        labels = data["labels"]
        logits = scores(args, model, data)
        loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))
        step(args, manager, optimizer, schedule, loss, epoch, it, len(dataloader["train"]))
    model.eval()
    with torch.no_grad():
        pd, gt = [], []
        for data in dataloader["dev"]:
            pd.extend(scores(args, model, data).argmax(dim=-1).cpu().tolist())
            gt.extend(data["labels"].cpu().tolist())
        report(args, "dev", epoch, gt, pd)
"""

# GPT-2 learns the prompt as well as the class; GPT-J and LLaMA the class alone.
CAUSAL = """
from model_center.model import {kind} as Model
from model_center.tokenizer import {kind}Tokenizer as Tokenizer
from model_center.dataset.{data}dataset import DATASET

args = initialize()
tokenizer = Tokenizer.from_pretrained(args.model_config)
model = Model.from_pretrained(args.model_config)
optimizer, schedule = get_optimizer(args, model)
task = DATASET[args.dataset_name]
dataset = {{
    split: task(
        f"{{args.base_path}}/down_data/superglue/", split, bmt.rank(), bmt.world_size(), tokenizer,
        args.max_decoder_length,
    )
    for split in ["train", "dev", "test"]
}}
verbalizer = torch.LongTensor(task.get_verbalizer(tokenizer)).cuda()
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule, loss_scale_steps=100)
print_inspect(model, "*")


def class_logits(logits, index):
    return logits.index_select(dim=-1, index=verbalizer)[torch.where(index == 1)]


for epoch in range(args.epochs):
    dataloader = loaders(dataset, args)
    model.train()
    for it, data in enumerate(dataloader["train"]):
        logits = model(data["input_ids"], data["input_length"], output_logits=True).logits
        loss = loss_func(class_logits(logits, data["index"]), data["labels"])
        if {with_text}:
            targets = data["targets"]
            loss = loss + loss_func(logits.view(-1, logits.shape[-1]), targets.view(-1))
        step(args, manager, optimizer, schedule, loss, epoch, it, len(dataloader["train"]))
        if args.save is not None and it % args.save_iters == 0:
            bmt.save(model, os.path.join(args.save, args.save_name + f"-{{it}}.pt"))
    model.eval()
    with torch.no_grad():
        pd, gt = [], []
        for data in dataloader["dev"]:
            logits = model(data["input_ids"], data["input_length"], output_logits=True).logits
            pd.extend(class_logits(logits, data["index"]).argmax(dim=-1).cpu().tolist())
            gt.extend(data["labels"].cpu().tolist())
        report(args, "dev", epoch, gt, pd)
"""
GPT2 = CAUSAL.format(kind="GPT2", data="gpt2", with_text=True)
GPTJ = CAUSAL.format(kind="GPTj", data="gpt2", with_text=False)
LLAMA = CAUSAL.format(kind="Llama", data="llama", with_text=False)

# Of T5, T5 v1.1 and mT5.
T5 = """
from model_center.model import T5
from model_center.tokenizer import T5Tokenizer
from model_center.dataset.t5dataset import DATASET

args = initialize()
tokenizer = T5Tokenizer.from_pretrained(args.model_config)
model = T5.from_pretrained(args.model_config)
optimizer, schedule = get_optimizer(args, model)
task = DATASET[args.dataset_name]
dataset = {
    split: task(
        f"{args.base_path}/down_data/superglue/", split, bmt.rank(), bmt.world_size(), tokenizer,
        args.max_encoder_length, args.max_decoder_length,
    )
    for split in ["train", "dev", "test"]
}
verbalizer = torch.LongTensor(task.get_verbalizer(tokenizer)).cuda()
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule, loss_scale_steps=100)


def class_logits(data):
    logits = model(
        data["enc_input"], data["enc_length"], data["dec_input"], data["dec_length"],
        output_logits=True,
    ).logits
    return logits.index_select(dim=-1, index=verbalizer)[torch.where(data["index"] == 1)]


for epoch in range(args.epochs):
    dataloader = loaders(dataset, args)
    model.train()
    for it, data in enumerate(dataloader["train"]):
        loss = loss_func(class_logits(data), data["targets"])
        step(args, manager, optimizer, schedule, loss, epoch, it, len(dataloader["train"]))
    model.eval()
    with torch.no_grad():
        pd, gt = [], []
        for data in dataloader["dev"]:
            pd.extend(class_logits(data).argmax(dim=-1).cpu().tolist())
            gt.extend(data["targets"].cpu().tolist())
        report(args, "dev", epoch, gt, pd)
"""

SQUAD = """
from torch.utils.data import DataLoader

from model_center.model import T5
from model_center.tokenizer import T5Tokenizer
from model_center.dataset.t5dataset import DATASET
from model_center.generation.t5 import T5BeamSearch

args = initialize()
tokenizer = T5Tokenizer.from_pretrained(args.model_config)
model = T5.from_pretrained(args.model_config)
optimizer, schedule = get_optimizer(args, model)
dataset = {
    split: DATASET["SQuAD"](
        f"{args.base_path}/down_data/squad", split, tokenizer, args.max_encoder_length,
        args.max_decoder_length,
    )
    for split in ["train", "dev"]
}
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule, loss_scale_steps=100)
beam_search = T5BeamSearch(model=model, tokenizer=tokenizer)


def listed(rows):
    return {key: [row[key] for row in rows] for key in ("inputs", "targets")}


for epoch in range(args.epochs):
    train = DistributedDataLoader(dataset["train"], batch_size=args.batch_size, shuffle=True)
    dev = DataLoader(dataset["dev"], batch_size=args.batch_size, collate_fn=listed)
    model.train()
    for it, data in enumerate(train):
        logits = model(
            input_ids=data["input_ids"],
            attention_mask=data["attention_mask"],
            decoder_input_ids=data["decoder_input_ids"],
            decoder_attention_mask=data["decoder_attention_mask"],
            output_logits=True,
        ).logits
        targets = data["targets"]
        loss = loss_func(logits.view(-1, logits.shape[-1]), targets.view(-1))
        step(args, manager, optimizer, schedule, loss, epoch, it, len(train))
    model.eval()
    right, total = 0, 0
    with torch.no_grad():
        for data in dev:
            answers = beam_search.generate(
                data["inputs"], beam_size=2, max_length=args.max_decoder_length
            )
            right += sum(a in targets for a, targets in zip(answers, data["targets"], strict=True))
            total += len(answers)
    bmt.print_rank(f"dev epoch {epoch} rows {total} right {right}")
"""

PRETRAIN_CPM1 = """
from torch.utils.tensorboard import SummaryWriter

from model_center.model import CPM1, CPM1Config
from model_center.dataset import DistributedMMapIndexedDataset
from model_center.dataset.cpm1dataset import CPM1_Dataset, CPM1_Dataset_Merge


class Packer:
    # Pieces, each in the first row that has room for it.
    def __init__(self, dataset, batch_size, max_length):
        self.dataset, self.batch_size, self.max_length = dataset, batch_size, max_length

    def __iter__(self):
        rows = [[] for _ in range(self.batch_size)]
        while True:
            for number in range(len(self.dataset)):
                ctx, tgt, length, context = self.dataset[number]
                if ctx is None:
                    continue
                for row in rows:
                    if sum(piece[2] for piece in row) + length <= self.max_length:
                        break
                else:
                    yield self.batch(rows)
                    rows = [[] for _ in range(self.batch_size)]
                    row = rows[0]
                row.append((ctx, tgt, length, context))

    def batch(self, rows):
        shape = (self.batch_size, self.max_length)
        data = {
            "ctx": torch.zeros(shape, dtype=torch.long),
            "tgt": torch.full(shape, -100, dtype=torch.long),
            "context": torch.zeros(shape, dtype=torch.bool),
            "span": torch.zeros(shape, dtype=torch.long),
            "length": torch.zeros(self.batch_size, dtype=torch.long),
        }
        for place, row in enumerate(rows):
            start = 0
            for span, (ctx, tgt, length, context) in enumerate(row):
                data["ctx"][place, start : start + length] = torch.from_numpy(ctx)[:length].long()
                data["tgt"][place, start : start + length] = torch.from_numpy(tgt)[:length].long()
                data["context"][place, start : start + length] = torch.from_numpy(context)[:length]
                data["span"][place, start : start + length] = span
                start += length
            data["length"][place] = start
        return {key: value.cuda() for key, value in data.items()}


args = initialize()
model = CPM1(CPM1Config.from_pretrained(args.model_config))
if args.load is not None:
    bmt.load(model, args.load)
else:
    bmt.init_parameters(model)
optimizer, schedule = get_optimizer(args, model)
pieces = DistributedMMapIndexedDataset(args.base_path + "/", "cpm1_lm", bmt.rank(), bmt.world_size())
dataset = CPM1_Dataset_Merge(pieces, max_length=args.max_length)
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule)
writer = SummaryWriter("runs/cpm-1") if bmt.rank() == 0 else None
for it, data in enumerate(Packer(dataset, args.batch_size, args.max_length)):
    if it == args.train_iters:
        break
    logits = model(
        data["ctx"], data["length"], context=data["context"], span=data["span"]
    ).logits
    loss = loss_func(logits.view(-1, logits.shape[-1]), data["tgt"].view(-1))
    step(args, manager, optimizer, schedule, loss, 0, it, args.train_iters)
    if writer is not None:
        writer.add_scalar("Loss/train", loss.item(), it)
bmt.save(model, os.path.join(args.save, args.save_name + ".pt"))
"""

PRETRAIN_CPM2 = """
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.tensorboard import SummaryWriter

from model_center.model import CPM2, CPM2Config
from model_center.dataset.cpm2dataset import CPM2_Dataset


class Stride(IterableDataset):
    # Every rank its rows of one order.
    def __init__(self, dataset, order):
        self.dataset, self.order = dataset, order

    def __iter__(self):
        for number in self.order[bmt.rank() :: bmt.world_size()]:
            row = self.dataset[int(number)]
            if row is not None:
                yield row


args = initialize()
model = CPM2(CPM2Config.from_pretrained(args.model_config))
if args.load is not None:
    bmt.load(model, args.load)
else:
    bmt.init_parameters(model)
optimizer, schedule = get_optimizer(args, model)
dataset = CPM2_Dataset(
    MMapIndexedDataset(args.base_path + "/context"),
    MMapIndexedDataset(args.base_path + "/target"),
    max_source_length=args.max_encoder_length,
    max_target_length=args.max_decoder_length,
)
order = np.random.RandomState(args.seed).permutation(len(dataset))
loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
manager = get_manager(args, optimizer, schedule)
writer = SummaryWriter("runs/cpm-2") if bmt.rank() == 0 else None
loader = DataLoader(Stride(dataset, order), batch_size=args.batch_size)
for it, data in enumerate(loader):
    data = {key: value.cuda() for key, value in data.items()}
    dec_input = data["tgt"][:, :-1].clamp(min=0)
    targets = data["tgt"][:, 1:].contiguous()
    logits = model(data["ctx"], data["len_ctx"], dec_input, data["len_tgt"]).logits
    loss = loss_func(logits.view(-1, logits.shape[-1]), targets.view(-1))
    step(args, manager, optimizer, schedule, loss, 0, it, len(dataset))
    if writer is not None:
        writer.add_scalar("Loss/train", loss.item(), it)
bmt.save(model, os.path.join(args.save, args.save_name + ".pt"))
"""
