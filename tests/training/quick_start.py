"""The program of ModelCenter's README (Apache License 2.0), statement by statement as it stands
there, without its remarks.

| fragment | place in the README's quick start |
|---|---|
| INIT, MODEL, DATASET, LOOP | steps 1 to 4 |
| FROM_CONFIG | step 2, the part for who has a configuration and no weights |
"""

from tests.training.seed_programs import CLASSIFIER_LOOP

INIT = """
import bmtrain as bmt
bmt.init_distributed(seed=0)
"""

MODEL = """
import torch
from model_center.model import Bert, BertConfig
from model_center.layer import Linear

class BertModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = Bert.from_pretrained("bert-base-uncased")
        self.dense = Linear(config.dim_model, 2)
        bmt.init_parameters(self.dense)

    def forward(self, input_ids, attention_mask):
        pooler_output = self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = self.dense(pooler_output)
        return logits

config = BertConfig.from_pretrained("bert-base-uncased")
model = BertModel(config)
"""

FROM_CONFIG = """
config = BertConfig.from_json_file("your/path/to/config.json")
model = Bert(config)
bmt.init_parameters(model)
# bmt.load(model, "your/path/to/pytorch_model.pt")
"""

DATASET = """
from model_center.dataset.bertdataset import DATASET
from model_center.dataset import DistributedDataLoader
from model_center.tokenizer import BertTokenizer

tokenizer = BertTokenizer.from_pretrained("bert-base-uncased")
splits = ['train', 'dev']
dataset = {}

for split in splits:
    dataset[split] = DATASET['BoolQ']('your_path_to_dataset', split, bmt.rank(), bmt.world_size(), tokenizer, max_encoder_length=512)

batch_size = 64
train_dataloader = DistributedDataLoader(dataset['train'], batch_size=batch_size, shuffle=True)
dev_dataloader = DistributedDataLoader(dataset['dev'], batch_size=batch_size, shuffle=False)
"""

LOOP = CLASSIFIER_LOOP

PROGRAM = INIT + MODEL + DATASET + LOOP
