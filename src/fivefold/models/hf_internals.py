"""The one file that reads private or semi-private interfaces of `transformers`.

`tests/models/test_hf_internals.py` holds one contract test per family: when a new minor version of `transformers` moves
one of these interfaces, those tests fail and only this file needs a fix.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
import transformers.initialization as hf_initialization
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import get_state_dict_dtype, load_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

from fivefold.core import strict_json
from fivefold.core.errors import UserError, first_line
from fivefold.core.folder_config import read_folder_config
from fivefold.models.merged import ExpertPiece, merged
from fivefold.torch_internals import Dispatch

# Styles of a linear in the tensor parallel plans of `transformers` -> its role here.
PLAN_STYLES: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "local",
}

# The initialisers that `_init_weights` reaches, by the name under which both namespaces offer them.
INITIALISERS = (
    "uniform_", "normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_", "sparse_", "copy_",
)  # fmt: skip


# Configs -------------------------------------------------------------------------------------------------------------


def config_class(model_type: str) -> type[PreTrainedConfig] | None:
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 (it has no .get of its own)


def config_keys(cls: type[PreTrainedConfig]) -> set[str]:
    return set(cls().to_dict()) | set(cls.attribute_map)


def config_of_values(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that `AutoConfig` builds from a `config.json` with these values."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def of_plain_weights(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy without the quantisation settings of weight files, as the weights here are not quantised."""
    copied = copy.deepcopy(config)
    for part in (copied, copied.get_text_config()):
        vars(part).pop("quantization_config", None)
    return copied


def untied_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy whose model has a head of its own."""
    copied = copy.deepcopy(config)
    for part in (copied, copied.get_text_config()):
        part.tie_word_embeddings = False
    return copied


def quantisation(folder: Path) -> str | None:
    """The quantisation method that the files of a folder state ("gptq", "fp8"...); None if they state none."""
    for name, keys in (
        ("config.json", ("quantization_config",)), ("config.json", ("text_config", "quantization_config")),
        ("quantize_config.json", ()), ("quant_config.json", ()), ("hf_quant_config.json", ("quantization",)),
    ):  # fmt: skip
        values: Any = read_folder_config(folder / name) if (folder / name).is_file() else {}
        for key in keys:
            values = values.get(key) or {} if isinstance(values, dict) else {}
        if values:
            method = next((values[key] for key in ("quant_method", "quant_algo") if values.get(key)), None)
            return str(method or _OLD_METHODS.get(name, "bitsandbytes")).lower()
    return None


_OLD_METHODS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Quantisation methods that need no package but PyTorch -> the config that dequantises them.
_DEQUANTISES: Mapping[str, Callable[..., Any]] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def dequantised_model(folder: Path, method: str) -> PreTrainedModel | None:
    """A folder of quantised weights, dequantised by `transformers` on the CPU; None if that needs other packages."""
    if method not in _DEQUANTISES:
        return None
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=_DEQUANTISES[method](dequantize=True), dtype="auto", local_files_only=True,
        use_safetensors=True, trust_remote_code=False,
    )  # fmt: skip
    return base_first(loaded)


# Models --------------------------------------------------------------------------------------------------------------


def causal_lm_on_meta(
    config: PreTrainedConfig, attention: str, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """The causal language model of `config`, in fp32 on the meta device, with the named attention function.
    `model_class` is needed if `AutoModelForCausalLM` does not know the config, such as a part of a larger model. Raises
    `UserError` for a class with attention functions of its own only."""
    make = (
        model_class._from_config if model_class else partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
    )
    with torch.device("meta"):
        try:
            model: PreTrainedModel = make(of_plain_weights(config), dtype=torch.float32, attn_implementation=attention)
        except KeyError as error:
            if error.args != (attention,):
                raise
            kind = causal_class_name(config)
            raise UserError(
                f"{kind} attends by code of its own, not by the attention functions of transformers",
                fix="use a model that calls the attention functions of transformers",
            ) from error
    return _all_on_meta(base_first(model))


def causal_class_name(config: PreTrainedConfig) -> str:
    """The class of the causal language model of a config; "" if `transformers` knows none."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__) if known else ""


def copy_on_meta(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A second model of the same class and config, in fp32 on the meta device, with the named attention function. A
    model that was changed after construction is copied as it is now."""
    made = causal_lm_on_meta(model.config, attention, type(model))
    if unlike_its_class(model, made) is None:
        return made
    memo: dict[int, Any] = {
        id(buffer): buffer.to("meta" if buffer.is_meta else "cpu", copy=True) for buffer in model.buffers()
    }
    memo |= {
        id(parameter): nn.Parameter(parameter.to("meta"), parameter.requires_grad) for parameter in model.parameters()
    }
    try:
        copied: PreTrainedModel = base_first(copy.deepcopy(model, memo).float())
    except Exception as error:  # it may hold a lock, a file, or a tensor with a history
        raise UserError(
            f"{type(model).__name__} was changed after it was made, and cannot be copied: {first_line(error)}",
            fix="keep what copy.deepcopy does not take outside of the model",
        ) from error
    select_attention(copied, attention)
    return copied


def unlike_its_class(model: PreTrainedModel, made: PreTrainedModel | None = None) -> str | None:
    """The first difference between a model and what its class builds from its config, in words: a module of another
    class, added, gone, with a forward of its own, or with other sizes; None if there is none."""
    made = made or causal_lm_on_meta(model.config, "eager", type(model))
    expected = dict(made.named_modules(remove_duplicate=False))
    found = dict(model.named_modules(remove_duplicate=False))
    for name, module in found.items():
        if "forward" in vars(module):
            return f"{name or 'the model'} has a forward of its own"
        if name not in expected:
            return f"{name} was added"
        if type(module) is not type(expected[name]):
            return f"{name} is a {type(module).__name__} in place of a {type(expected[name]).__name__}"
        if _sizes(module) != _sizes(expected[name]):
            return f"{name} has other sizes than its config says"
    return next((f"{name} is gone" for name in expected if name not in found), None)


def _sizes(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return own, own_numbers(module)


def own_numbers(module: nn.Module) -> dict[str, int]:
    """The numbers in the attributes of a module with weights, such as heads, or experts per token."""
    if isinstance(module, PreTrainedModel) or next(module.parameters(), None) is None:
        return {}
    others = ("training", "gradient_checkpointing", "padding_idx", "layer_idx")
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and not name.startswith("_") and name not in others
    }


def _again(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Build the model's class once more, in fp32 unless `options` override it."""
    made: PreTrainedModel = type(model)._from_config(copy.deepcopy(model.config), **{"dtype": torch.float32, **options})
    return base_first(made)


def base_first(model: PreTrainedModel) -> PreTrainedModel:
    """Move the head after the rest, the order of most classes: a tied weight then has the embedding's name in all of
    them (in XLM-RoBERTa it would have the head's)."""
    children = dict(model.named_children())
    base = children.get(base_prefix(model))
    for name, child in children.items():
        if base not in (None, child):
            delattr(model, name)
            setattr(model, name, child)
    return model


def _all_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Move remaining parameters to meta: some constructors ignore the device context (`torch.normal`)."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    return model


def reference_model(like: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The unmodified model of another's class and config in fp64 on the CPU, with these values and own attention."""
    model = _again(like, dtype=torch.float64, attn_implementation=_own_attention(like.config, type(like)))
    select_experts(model, "eager")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])
    return model


def unmodified_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` as `transformers` builds it on the CPU, with weights of its own and its own attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        of_plain_weights(config),
        dtype=dtype,
        attn_implementation=_own_attention(config),
        trust_remote_code=False,
    )
    select_experts(model, "eager")
    return base_first(model)


def load_unmodified(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a local folder as `transformers` loads it, with its own attention."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if quantisation(folder) not in _DEQUANTISES:
        config = of_plain_weights(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=_own_attention(config), local_files_only=True,
        use_safetensors=True, trust_remote_code=False,
    )  # fmt: skip
    select_experts(model, "eager")
    return base_first(model)


def no_progress_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warnings of `transformers` about unused settings, which fivefold reports itself."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def _own_attention(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None) -> str:
    """PyTorch's attention, or the model's own code if PyTorch's lacks soft caps or sinks."""
    serves = (model_class or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])._supports_sdpa
    return "sdpa" if serves and not has_softcap(config) else "eager"


def has_softcap(config: PreTrainedConfig) -> bool:
    """True if the attention of a model soft-caps its scores (Gemma 2)."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def register_attention(name: str, forward: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Offer an attention function, and the mask function that goes with it, to every model under `name`."""
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)


def select_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)


def implementations(model: nn.Module) -> list[tuple[str | None, str | None]]:
    """The attention and the experts functions that the modules of `model` find in their configs at every forward."""
    names = ("_attn_implementation", "_experts_implementation")
    configs = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    return [(getattr(config, names[0], None), getattr(config, names[1], None)) for config in configs]


def register_experts(name: str, forward: Callable[..., torch.Tensor]) -> None:
    ExpertsInterface.register(name, forward)


def select_experts(model: PreTrainedModel, name: str) -> None:
    """Make every module of experts of `model` call the function registered under `name` ("eager": its own code)."""
    if any(is_experts(module) for module in model.modules()):
        model.set_experts_implementation(name)


def is_experts(module: nn.Module) -> bool:
    """True if a module holds the weights of all experts of a layer, and calls the experts function for them."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def base_prefix(model: PreTrainedModel) -> str:
    """The name of the submodule with everything but the head (`model` for most families). The class states it; if no
    such attribute exists, it is the single model inside this one."""
    stated = str(model.base_model_prefix)
    held = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return held[0] if not hasattr(model, stated) and len(held) == 1 else stated


def block_classes(model: PreTrainedModel) -> set[str]:
    return set(model._no_split_modules or ())


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """The model's own plan: module name pattern (`*` = a layer index), from the root of the model -> style."""
    base = base_prefix(model)
    body = {f"{base}.{name}": style for name, style in (model.config.base_model_tp_plan or {}).items()}
    return body | dict(type(model)._tp_plan or {})


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Tied parameters: {name that is not stored: name that is}."""
    return dict(model.all_tied_weights_keys)


def names_in_model(
    model: PreTrainedModel, stored: Collection[str]
) -> tuple[dict[str, str], dict[str, tuple[ExpertPiece, ...]]]:
    """How `transformers` loads tensors whose names in a file differ from those in the model: ({`stored` name: name in
    the model} for renamed tensors, as in older classes and in base models, which lack the prefix; {name in the model:
    its pieces} for merged ones, expert by expert). All other conversions are left out."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    patterns = {
        pattern: (index, len(converter.source_patterns))
        for converter in converters
        if _merges(converter)
        for index, pattern in enumerate(converter.source_patterns)
    }
    known = model.state_dict()
    renamed: dict[str, str] = {}
    pieces = []
    for name in sorted(set(stored) - set(known)):
        own, pattern = rename_source_key(name, renamings, converters, base_prefix(model), known)
        if own not in known:
            continue
        if pattern is None and own not in stored and own not in renamed.values():
            renamed[name] = own
        if pattern in patterns and (number := re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)):
            pieces.append((own, ExpertPiece(name, int(number[1]), *patterns[pattern])))
    return renamed, merged(pieces)


def _merges(converter: WeightConverter) -> bool:
    """True if it stacks experts along dimension 0, with several tensors of each concatenated."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    several = len(converter.source_patterns) > 1
    return kinds == [(MergeModulelist, 0), *([(Concatenate, 1)] if several else [])]


def saved_as(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, tuple[ExpertPiece, ...]]]:
    """({name in the model: the name under which `transformers` saves it}, {name in the model: the pieces that
    `transformers` saves in its place})."""
    tensors = model.state_dict()
    saved = revert_weight_conversion(model, dict(tensors))
    names = {id(tensor): name for name, tensor in saved.items()}
    pieces = names_in_model(model, saved)[1]
    return {name: names.get(id(tensor), name) for name, tensor in tensors.items()}, pieces


def unexpected_keys_to_ignore(model: PreTrainedModel) -> set[str]:
    """Regular expressions of checkpoint keys that the model allows to leave unread: those of its class, and those of
    the layers that its config counts behind the last one it builds (`unbuilt_layers`)."""
    first = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    more = min(sum(unbuilt_layers(model).values()), first)  # no model has more of them; a damaged config may say so
    behind = [rf"(^|\.)layers\.{first + index}\." for index in range(more)] + [r"(^|\.)mtp"][:more]
    return {*behind, *(model._keys_to_ignore_on_load_unexpected or ())}


def unbuilt_layers(model: PreTrainedModel) -> dict[str, int]:
    """The counts in the config of layers that predict further tokens (MTP), none of which the model has: {key: count}.
    `transformers` reads no such layers; a config that declares them makes a server look for their weights."""
    if any(_PREDICTS.search(name) for name, _ in model.named_parameters()):
        return {}
    values = model.config.get_text_config().to_dict()
    counts = {key: value for key, value in values.items() if _PREDICTS.search(key) and re.search("num|layers$", key)}
    return {key: value for key, value in counts.items() if type(value) is int and value > 0}


# num_nextn_predict_layers (DeepSeek, GLM), num_mtp_layers (Mellum), mtp_num_hidden_layers (Qwen3.5).
_PREDICTS = re.compile("nextn|mtp")


# Types of weights ----------------------------------------------------------------------------------------------------


def dtype_of_file(first: Path) -> torch.dtype:
    """The type of `from_pretrained(dtype="auto")`, by the first file of a folder whose config names none."""
    found: torch.dtype = get_state_dict_dtype(load_state_dict(str(first), map_location="meta"))
    return found


def stored_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type in which `from_pretrained(dtype=dtype)` loads each tensor, and `save_pretrained` writes it, by its name
    in the model: `dtype`, except where the class makes it in another or keeps it in fp32 (`_keep_in_fp32_modules`)."""
    with torch.device("meta"):
        made = _again(model, dtype=dtype)
    types = {name: tensor.dtype for name, tensor in made.state_dict().items()}
    if kept := made._get_dtype_plan(dtype):
        pattern, keys, _ = build_glob_alternation([*kept])
        found = {name: match for name in types if (match := pattern.search(name))}
        types |= {name: kept[keys[match.lastgroup]] for name, match in found.items()}
    return types


# Generation ----------------------------------------------------------------------------------------------------------


TEMPLATE_FILES = (CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE)


def file_names() -> set[str]:
    """The names that `transformers` has for the files of a folder."""
    return {value for key, value in vars(transformers.utils).items() if re.fullmatch("[A-Z_]+_(NAME|FILE)", key)}


def generation_config(folder: Path) -> GenerationConfig:
    """The generation config that `from_pretrained` uses for a folder: its generation_config.json, else the generation
    settings in its config.json. Raises `UserError` for files that cannot be read."""
    has_own = (folder / "generation_config.json").is_file()
    name, of_config = ("generation_config.json", {}) if has_own else ("config.json", {"_from_model_config": True})
    try:
        strict_json.read_config(folder / name)
        with _without_warnings():
            given: GenerationConfig = GenerationConfig.from_pretrained(
                folder, config_file_name=name, local_files_only=True, **of_config
            )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / name} cannot be read: {first_line(error)}") from error
    return given


def generation_values(settings: GenerationConfig) -> dict[str, Any]:
    """The values of a generation config that differ from the defaults of `generate`."""
    plain = settings._get_default_generation_params()
    said = {key: value for key, value in settings.to_diff_dict().items() if not key.startswith("_")}
    return {key: value for key, value in said.items() if value not in (None, plain.get(key))}


def logits_processors(
    model: Any, ids_1T: torch.Tensor, max_new_tokens: int, options: Mapping[str, Any]
) -> LogitsProcessorList:
    """The processors that `generate` applies to the logits of a text, from `options` and the model's generation config;
    without those that run the model again (`guidance_scale`)."""
    with _without_warnings():
        settings, _ = GenerationMixin._prepare_generation_config(model, GenerationConfig(**options))
    settings.max_length, settings.guidance_scale = ids_1T.shape[1] + max_new_tokens, None
    GenerationMixin._prepare_special_tokens(model, settings, True, device=ids_1T.device)
    made: LogitsProcessorList = GenerationMixin._get_logits_processor(
        model, settings, ids_1T.shape[1], ids_1T, device=ids_1T.device
    )
    return made


# Initialisation ------------------------------------------------------------------------------------------------------


@contextmanager
def intercepted_initialisers(receive: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """Inside, pass every initialiser call to `receive(name, its arguments by name)` without running it."""

    def stand_in(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        parameters = signature(function)

        def initialise(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            receive(name, given.arguments)
            return cast(torch.Tensor, given.arguments["tensor"])

        return initialise

    places = [(space, name) for space in (hf_initialization, nn.init) for name in INITIALISERS]
    originals = [(space, name, getattr(space, name)) for space, name in places if hasattr(space, name)]
    try:
        for space, name, function in originals:
            setattr(space, name, stand_in(name, function))
        yield
    finally:
        for space, name, function in originals:
            setattr(space, name, function)


@contextmanager
def untied(model: PreTrainedModel) -> Iterator[None]:
    """Inside, tied names hold separate tensors, as in the constructor, which initialises first and ties later."""
    originals = {name: model.get_parameter(name) for name in tied_parameters(model)}
    try:
        for name, tensor in originals.items():
            _set_parameter(model, name, nn.Parameter(torch.empty_like(tensor)))
        yield
    finally:
        for name, tensor in originals.items():
            _set_parameter(model, name, tensor)


def _set_parameter(model: nn.Module, name: str, tensor: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, tensor)


def constructed_values(like: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters and buffers that the constructors of such a model compute before any initialiser runs, on the CPU.
    Those that they draw, or leave without values, are left out (and never take memory)."""
    builds = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]), intercepted_initialisers(lambda *_: None), Dispatch(_empty_on_meta):
            torch.manual_seed(seed)
            model = _again(like)
        tensors = (*model.named_parameters(), *model.named_buffers())
        builds.append({name: tensor.detach() for name, tensor in tensors if not tensor.is_meta})
    one, other = builds
    return {name: values for name, values in one.items() if name in other and torch.equal(values, other[name])}


_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")


def _empty_on_meta(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Allocate memory without values on the meta device."""
    device = {"device": torch.device("meta")} if operator.name().partition(".")[0] in _EMPTY else {}
    return operator(*args, **{**kwargs, **device})


def initialise_again(model: PreTrainedModel) -> None:
    """Run the model's own initialisation on every module, even if it has run before."""
    marked: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    for item in marked:
        if hasattr(item, "_is_hf_initialized"):
            del item._is_hf_initialized
    model.initialize_weights()


# Linears -------------------------------------------------------------------------------------------------------------

# Class -> (dimension of the outputs in its weight, of the inputs, attributes that hold the two sizes). Derived classes
# (quantised linears) are linears too. Norms are not recognised by class: the trace sees what they do.
LINEARS: Mapping[type[nn.Module], tuple[int, int, tuple[str, str]]] = {
    nn.Linear: (0, 1, ("out_features", "in_features")),
    Conv1D: (1, 0, ("nf", "nx")),
}


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """The output and input dimensions of a linear's weight. None for other modules, and for derived classes that do
    something else (Llama 4's router is an `nn.Linear` that picks experts)."""
    known = _registered(module)
    if known is None or not (is_plain_linear(module) or _maps_features(module, *LINEARS[known][:2])):
        return None
    return LINEARS[known][:2]


def is_plain_linear(module: nn.Module) -> bool:
    """True if its class uses the forward of the registered class."""
    known = _registered(module)
    return known is not None and type(module).forward is known.forward


def set_linear_sizes(module: nn.Module) -> None:
    known = _registered(module)
    assert known is not None, f"{type(module).__name__} is no linear"
    out_dim, in_dim, (outputs, inputs) = LINEARS[known]
    weight = cast(torch.Tensor, module.weight)
    setattr(module, outputs, weight.shape[out_dim])
    setattr(module, inputs, weight.shape[in_dim])


def _registered(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in LINEARS if isinstance(module, kind)), None)


def _maps_features(module: Any, out_dim: int, in_dim: int) -> bool:
    """True if the forward of its own class maps [1, 1, inputs] to one tensor [1, 1, outputs]: tried on meta."""
    trial = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        own = vars(module)[kind].items()
        vars(trial)[kind] = {name: t if t is None else nn.Buffer(torch.empty_like(t, device="meta")) for name, t in own}
    shape, dtype = module.weight.shape, module.weight.dtype
    try:
        with torch.no_grad():
            out = type(module).forward(trial, torch.empty(1, 1, shape[in_dim], dtype=dtype, device="meta"))
    except Exception:  # the class's own code
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 1, shape[out_dim])


# Attribute names of head counts in attention modules, for models that split a fused projection by them.
HEAD_COUNTS = {
    "num_heads": "query", "num_attention_heads": "query", "n_head": "query",
    "num_key_value_heads": "kv", "num_kv_heads": "kv",
}  # fmt: skip
FEATURE_COUNTS = ("split_size", "embed_dim", "hidden_size")  # features of all query heads


def forced_tokenizer_class(model_type: str) -> str | None:
    """The class that `AutoTokenizer` uses for this model type, whatever its files name; None if they decide."""
    from transformers.models.auto import tokenization_auto

    forced = model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    name = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(model_type) if forced else None
    return None if name == "TokenizersBackend" else name
