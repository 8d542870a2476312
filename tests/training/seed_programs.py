"""The programs in the documents of BMTrain and ModelCenter (Apache License 2.0), statement by
statement as they stand there.

Remarks are left out. A name in `FRAGMENTS` says what the fragment does; where it stands:

| fragment | documents | |---|---| | init, init_zero_level | manual, README, Chinese README and
usage guide, ModelCenter's README; README and Chinese README | | module_plain, module_blocks,
module_list | manual, README, Chinese README, usage guide: "original", "replaced", "replaced" again
| | gpt_model, gpt_optimizer, gpt_loop | README and Chinese README, parts 2 to 4 of the example;
`backward(loss)` in the Chinese one | | classifier_loop | ModelCenter's README, step 4 |

Places where the documents leave something to the reader, `# ... load data for each rank ...` for
example, are kept: `program` fills them in.
"""

INIT = """
import bmtrain as bmt
bmt.init_distributed(
    seed=0,
    # ...
)
"""

INIT_ZERO_LEVEL = """
import bmtrain as bmt
bmt.init_distributed(
    seed=0,
    zero_level=3,
    # ...
)
"""

MODULE_PLAIN = """
import torch
class MyModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.param = torch.nn.Parameter(torch.empty(1024))
        self.module_list = torch.nn.ModuleList([
            SomeTransformerBlock(),
            SomeTransformerBlock(),
            SomeTransformerBlock()
        ])

    def forward(self):
        x = self.param
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x
"""

MODULE_BLOCKS = """
import torch
import bmtrain as bmt
class MyModule(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(1024))
        self.module_list = torch.nn.ModuleList([
            bmt.CheckpointBlock(SomeTransformerBlock()),
            bmt.CheckpointBlock(SomeTransformerBlock()),
            bmt.CheckpointBlock(SomeTransformerBlock())
        ])

    def forward(self):
        x = self.param
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x
"""

MODULE_LIST = """
import torch
import bmtrain as bmt
class MyModule(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(1024))
        self.module_list = bmt.TransformerBlockList([
            bmt.CheckpointBlock(SomeTransformerBlock()),
            bmt.CheckpointBlock(SomeTransformerBlock()),
            bmt.CheckpointBlock(SomeTransformerBlock())
        ])

    def forward(self):
        x = self.param
        x = self.module_list(x, 1, 2, 3)
        return x
"""

GPT_MODEL = """
bmtrain.init_distributed(seed=0)

model = GPT(
    num_layers=8,
    vocab_size=10240,
    dim_model=2560,
    dim_head=80,
    num_heads=32,
    dim_ff=8192,
    max_distance=1024,
    bias=True,
    dtype=torch.half
)

bmtrain.init_parameters(model)

# ... other initialization (dataset) ...
"""

GPT_OPTIMIZER = """
loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
optimizer = bmtrain.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
lr_scheduler = bmtrain.lr_scheduler.Noam(optimizer, start_lr=1e-3, warmup_iter=40, end_iter=1000, num_iter=0)
"""

GPT_LOOP = """
optim_manager = bmtrain.optim.OptimManager(loss_scale=1024)
optim_manager.add_optimizer(optimizer, lr_scheduler)

for iteration in range(1000):
    # ... load data for each rank ...

    pos = torch.arange(enc_input.size(1)).long().cuda().repeat(enc_input.size(0), 1)
    logits = model(
        enc_input,
        pos,
        pos < enc_length[:, None]
    )
    batch, seq_len, vocab_out_size = logits.size()

    loss = loss_func(logits.view(batch * seq_len, vocab_out_size), targets.view(batch * seq_len))

    global_loss = bmtrain.sum_loss(loss).item()

    optim_manager.zero_grad()

    optim_manager.backward()

    grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)

    optim_manager.step()

    # ... save checkpoint or print logs ...
"""

CLASSIFIER_LOOP = """
optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters())

lr_scheduler = bmt.lr_scheduler.Noam(
    optimizer,
    start_lr = 1e-5,
    warmup_iter = 100,
    end_iter = -1)

loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)

for epoch in range(5):
    model.train()
    for data in train_dataloader:
        input_ids = data['input_ids']
        attention_mask = data['attention_mask']
        labels = data['labels']

        optimizer.zero_grad()

        logits = model(input_ids, attention_mask)

        loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))

        global_loss = bmt.sum_loss(loss).item()

        loss = optimizer.loss_scale(loss)

        loss.backward()

        grad_norm = bmt.optim.clip_grad_norm(optimizer.param_groups, max_norm=10.0, scale = optimizer.scale, norm_type = 2)

        bmt.optim_step(optimizer, lr_scheduler)

        bmt.print_rank(
            "loss: {:.4f} | lr: {:.4e}, scale: {:10.4f} | grad_norm: {:.4f} |".format(
                global_loss,
                lr_scheduler.current_lr,
                int(optimizer.scale),
                grad_norm,
            )
        )

    model.eval()
    with torch.no_grad():
        pd = []
        gt = []
        for data in dev_dataloader:
            input_ids = data["input_ids"]
            attention_mask = data["attention_mask"]
            labels = data["labels"]

            logits = model(input_ids, attention_mask)
            loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))

            logits = logits.argmax(dim=-1)

            pd.extend(logits.cpu().tolist())
            gt.extend(labels.cpu().tolist())

        pd = bmt.gather_result(torch.tensor(pd).int()).cpu().tolist()
        gt = bmt.gather_result(torch.tensor(gt).int()).cpu().tolist()

        from sklearn.metrics import accuracy_score
        acc = accuracy_score(gt, pd)
        bmt.print_rank(f"accuracy: {acc*100:.2f}")
"""

FRAGMENTS = {
    "init": INIT,
    "init_zero_level": INIT_ZERO_LEVEL,
    "module_plain": MODULE_PLAIN,
    "module_blocks": MODULE_BLOCKS,
    "module_list": MODULE_LIST,
    "gpt_model": GPT_MODEL,
    "gpt_optimizer": GPT_OPTIMIZER,
    "gpt_loop": GPT_LOOP,
    "gpt_loop_zh": GPT_LOOP.replace("optim_manager.backward()", "optim_manager.backward(loss)"),
}


def program(*parts, places=None):
    """One program: names of fragments stand for them, other parts for themselves.

    Args:
        places: for a remark of the documents, `load data for each rank` for example, the statement
            that the reader puts there.
    """
    text = "\n".join(FRAGMENTS.get(part, part) for part in parts)
    for remark, statement in (places or {}).items():
        before, found, after = text.partition(f"# ... {remark} ...")
        if not found:
            raise ValueError(f"the program has no place for {remark!r}")
        text = before + statement + after
    return text
