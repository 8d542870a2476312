"""What programs may import from BMTrain and ModelCenter, and what of it is not here, and why."""

import contextlib
import importlib
import inspect
import itertools
import operator
import pathlib

from bmtrain.errors import BMTrainError

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


# By reason: functions, how many of the first arguments are the same by position in all releases and
# here, and those that are not taken by name.
DIFFERENT = {
    "refused, since nothing tells which release is meant": """
bmtrain.optim.adam.AdamOptimizer 5
bmtrain.optim.adam_offload.AdamOffloadOptimizer 5
model_center.model.config.bert_config.BertConfig 2 position_bias_max_distance use_cache
model_center.model.config.cpm2_config.CPM2Config 33 use_cache
model_center.model.config.llama_config.LlamaConfig 3
model_center.model.config.roberta_config.RobertaConfig 2 use_cache
model_center.model.config.vit_config.VitConfig 14
model_center.model.cpm1.CPM1.forward 0 input
model_center.model.cpm3.CPM3.forward 0 cached_attn_mask_pos_bias input last_input_idx position \
right_ctx_start_idx segment
""",
    "refused for the type of what is there": """
bmtrain.block_layer.Block 3 initialized
bmtrain.loss.cross_entropy.FusedCrossEntropy 1 reduce size_average
""",
    "settings of how a run computes, whose values are the same": """
bmtrain.block_layer.TransformerBlockList 1
bmtrain.init.init_distributed 0
""",
    "the value is the same, under another name": """
bmtrain.debug.get 0
bmtrain.inspect.model.inspect_pipeline_transformer_block_list 0 _prefix pipe_model
bmtrain.loss._function.has_inf_nan 0 g_fp16
model_center.dataset.distributed_dataset.DatasetWriter.write 0 data
model_center.layer.attention.Attention 14 shared_key_and_value
model_center.layer.attention.Attention.forward 2 mask
model_center.layer.position_embedding.RelativePositionEmbedding.forward 0 key_len query_len
model_center.model.cpm2.CPM2.forward 0 dec_input dec_length enc_input enc_length
model_center.tokenizer.cpm1_tokenizer.CPM1Tokenizer.decode 0
model_center.tokenizer.cpm1_tokenizer.CPM1Tokenizer.from_pretrained 0
model_center.tokenizer.cpm2_tokenizer.CPM2Tokenizer.decode 0
model_center.tokenizer.cpm2_tokenizer.CPM2Tokenizer.from_pretrained 0
""",
    "the library makes it": """
bmtrain.init.topology 0 config
bmtrain.nccl.NCCLCommunicator 0 ptr
model_center.dataset.distributed_dataset.DatasetWriter 0 fname
""",
    "which outputs there are, in ModelCenter to 0.1.3": """
model_center.model.bert.Bert.forward 7 encoder_attention_mask encoder_hidden_states return_logits
model_center.model.gpt2.GPT2.forward 7 encoder_attention_mask encoder_hidden_states return_logits
model_center.model.gptj.GPTj.forward 7 return_logits
model_center.model.roberta.Roberta.forward 7 encoder_attention_mask encoder_hidden_states return_logits
model_center.model.t5.T5.forward 12 return_logits
""",
    "`use_cache` of a configuration, after all others, in ModelCenter 0.1.2 and 0.1.3": """
model_center.layer.transformer.Decoder 23 use_cache
model_center.layer.transformer.Encoder 24 use_cache
model_center.model.config.cpm1_config.CPM1Config 35 use_cache
model_center.model.config.cpm3_config.CPM3Config 41 use_cache
model_center.model.config.gpt2_config.GPT2Config 32 use_cache
model_center.model.config.gptj_config.GPTjConfig 32 use_cache
model_center.model.config.t5_config.T5Config 36 use_cache
""",
}


def found(path):
    """What has this path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:length]))
            return operator.attrgetter(".".join(parts[length:]))(module)
    raise ModuleNotFoundError(path)


def common_length(one, other):
    """How many first elements are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_arguments_of_all_releases():
    """By position and by name. What is not here at all is listed above."""
    text = pathlib.Path(__file__).with_name("positions.txt").read_text(encoding="utf-8")
    different = set()
    for line in text.splitlines()[1:]:
        path, _, forms = line.partition(":")
        try:
            known = inspect.signature(found(path)).parameters.values()
        except (AttributeError, BMTrainError):
            continue
        own = [x for x in known if x.name != "self"]
        order = [x.name for x in own if x.kind is x.POSITIONAL_OR_KEYWORD]
        takes_any = {x.kind for x in own} & {inspect.Parameter.VAR_KEYWORD}
        if takes_any and not order:
            continue
        releases = [form.split() for form in forms.split("|")]
        common = [common_length(order, form) for form in releases]
        fewer = [n for n, form in zip(common, releases, strict=True) if n < len(form)]
        lost = {name for form in releases for name in form} - {x.name for x in own}
        lost = set() if takes_any else lost
        if lost or fewer:
            different.add(" ".join([path, str(min(fewer)), *sorted(lost)]))
    listed = [line for lines in DIFFERENT.values() for line in lines.strip().splitlines()]
    print(*sorted(different), sep="\n")
    assert different == set(listed) and len(listed) == len(set(listed))
