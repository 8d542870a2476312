"""What programs may import from BMTrain and ModelCenter, and what of it is not here, and why."""

import importlib
import inspect
import operator
import pathlib

import bmtrain

# By reason: modules, and names of them.
MISSING = {
    "private parts": """
bmtrain.block_layer _block_wrapper _get_param_kw
bmtrain.inspect.model _gather_value
bmtrain.pipe_layer _block_wrapper _get_param_kw
bmtrain.store _pickler _save_to_infer_model _save_to_local_rank0 _save_to_state_dict _unpickler
model_center.dataset.distributed_dataset _DEFAULT_BLOCK_SIZE _MASK_VALUE _random_string
model_center.dataset.utils _DEFAULT_BLOCK_SIZE _DEFAULT_SHUFFLE_BUCKET_SIZE _random_string
model_center.layer.conv _ntuple
""",
    "how the original computes, which has no counterpart": """
bmtrain load_nccl_pypi
bmtrain.checkpointing R
bmtrain.benchmark.utils format_size_
bmtrain.inspect.format align_str format_line item_formater
bmtrain.loss._function CHECK_INPUT
bmtrain.loss.cross_entropy F OpFusedCrossEntropy OpFusedCrossEntropyInplace VPFusedCrossEntropy
bmtrain.nccl dtype2nccl op2nccl
bmtrain.nn.parallel_linear_func async_all_gather_linear_backward_func async_all_gather_linear_func
bmtrain.nn.parallel_linear_func async_reduce_scatter_linear_func preprocess_input
bmtrain.optim._function CHECK_INPUT
bmtrain.optim.adam F
bmtrain.optim.adam_offload F G
bmtrain.optim.optim_manager G
model_center.layer.feedforward gelu gelu_impl
bmtrain.utils ALIGN ROW_WIDTH
model_center.dataset.utils support_tqdm
model_center.tokenizer.glm_tokenizer Encoder Encoder_SP get_encoder get_pairs
model_center.tokenizer.llama_tokenizer LlamaTokenizerBase
model_center.utils.net_utils download file_names
""",
    "imported there from another module, where it is; a module of this project has what it uses": """
bmtrain.block_layer debug hook_func
bmtrain.checkpointing debug
bmtrain.inspect.tensor debug
bmtrain.loss.cross_entropy all_gather all_reduce config
bmtrain.optim.adam check_torch_version config nccl
bmtrain.pipe_layer debug
bmtrain.synchronize distributed
bmtrain.utils config
model_center.layer.attention Linear
model_center.layer.blocks LayerNorm
model_center.layer.embedding to_2tuple
model_center.layer.transformer LayerNorm
model_center.model.bert BaseModel BaseModelOutputWithPooling Embedding Encoder LayerNorm Linear
model_center.model.cpm1 BaseModel BaseModelOutput Linear
model_center.model.cpm2 BaseModel Decoder Encoder Linear RelativePositionEmbedding
model_center.model.cpm2 Seq2SeqModelOutput
model_center.model.cpm3 BaseModel CPM2Config BaseModelOutput Encoder Linear
model_center.model.glm BaseModel Decoder LayerNorm RelativePositionEmbedding
model_center.model.gpt2 BaseModel BaseModelOutput Linear
model_center.model.gptj BaseModel BaseModelOutput Linear
model_center.model.llama BaseModel BaseModelOutput Linear
model_center.model.longformer BaseModel Embedding Encoder LayerNorm Linear
model_center.model.opt BaseModel BaseModelOutput
model_center.model.roberta BaseModel BaseModelOutputWithPooling Embedding Encoder LayerNorm Linear
model_center.model.t5 BaseModel Decoder Encoder Linear RelativePositionEmbedding Seq2SeqModelOutput
model_center.model.vit Conv2d LayerNorm
""",
    "spelt otherwise from the next version on": """
bmtrain.backward WarmupLRSchduler
bmtrain.lr_scheduler.no_decay WarmupLRSchduler
bmtrain.lr_scheduler.noam WarmupLRSchduler
bmtrain.lr_scheduler.warmup WarmupLRSchduler
model_center.model VisionTransformer
model_center.model.roberta RoertaLMHead RoertaPooler
model_center.model.vit VisionTransformer
""",
}


def surface():
    """By module: its names."""
    text = pathlib.Path(__file__).with_name("surface.txt").read_text(encoding="utf-8")
    lines = (line.partition(":") for line in text.splitlines()[1:])
    return {path: names.split() for path, _, names in lines}


def test_what_is_not_here_is_listed():
    """Neither more nor less."""
    missing = {
        f"{path}.{name}"
        for path, names in surface().items()
        for name in names
        if name not in dir(importlib.import_module(path))
    }
    listed = [
        f"{path}.{name}"
        for lines in MISSING.values()
        for path, *names in map(str.split, lines.strip().splitlines())
        for name in names
    ]
    assert missing == set(listed) and len(listed) == len(set(listed))


def test_arguments_have_the_names_of_the_originals():
    """Of all releases. Left out: `initialized` of Block, of the library's own use."""
    text = pathlib.Path(__file__).with_name("arguments.txt").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        path, *names = line.split()
        known = inspect.signature(operator.attrgetter(path)(bmtrain)).parameters
        assert {*names} <= {*known}, f"{path} has {[*known]}"
