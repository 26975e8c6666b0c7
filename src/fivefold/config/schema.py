"""The run file: one YAML file that says everything about a training run, and nothing about devices.

Every key has a default and a description with its unit. Strings such as `8k`, `1%` or `train:4096` are parsed only
here; the rest of the library sees resolved, frozen values. `runfile` reads the file itself, with the line of every key
for error messages.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fivefold.config.key import Key, keys_of
from fivefold.config.peers import REMOVED
from fivefold.config.runfile import CODE, COMMAND_LINE, READ_MORE, RunFile, code_named, explained
from fivefold.core.best import METRICS, MOST
from fivefold.core.errors import UserError, refuse
from fivefold.core.folder_config import read_folder_config
from fivefold.core.keys import LayoutKey, moved
from fivefold.core.model_limits import UNKNOWN, ModelLimits
from fivefold.core.named_code import NamedCode
from fivefold.core.objectives import OBJECTIVES, OF_TEXTS
from fivefold.core.optimizers import OPTIMIZERS, StateDtype, with_key
from fivefold.core.schedules import SCHEDULES
from fivefold.core.shapes import shape_folder
from fivefold.core.units import parse_count, parse_fraction, parse_length, parse_nodes, parse_steps
from fivefold.parallel.adapters.settings import AUTO, Lora
from fivefold.parallel.context.keys import MOST_RING
from fivefold.parallel.experts.keys import ExpertKeys
from fivefold.parallel.layout import KEYS, Compute, Layout

DEMO = Path(__file__).with_name("demo.yaml")
DEMO_TEXT = "python-stdlib"
DEFAULT_MAX_STEPS = 1000
LENGTHS = ("max_steps", "max_tokens", "max_epochs")  # keys of `train` for the length of a run; only one may be set
MOST_NAME_BYTES = 240  # of a file; file systems take 255, and written names get a few letters more
MOST_PATH_BYTES = 3000  # Linux takes 4096
MOST_ROWS = 2**31  # of a step; larger numbers are typing errors that take minutes to fail
MOST_VOCABULARY = 2**22
SHAPE_TOKENIZER = "train:2048"  # for a built-in shape, which has no tokenizer


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


def _printable(name: str) -> str:
    """Check that a terminal can show a name. Raises `ValueError`."""
    if not name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} holds characters that cannot be shown")
    return name


def _findable(path: str) -> str:
    """Check that file systems accept the length of a path. Raises `ValueError`."""
    longest = max(map(len, path.encode().split(b"/")))
    if longest > MOST_NAME_BYTES or len(path.encode()) > MOST_PATH_BYTES:
        raise ValueError(
            f"it has {len(path.encode())} bytes; a path has {MOST_PATH_BYTES} and each part {MOST_NAME_BYTES}"
        )
    return path


def _known(names: Collection[str], name: str) -> str:
    """Check that a name is one of `names`, as pydantic does for a `Literal`."""
    if name not in names:
        *others, last = map(repr, names)
        raise PydanticCustomError("literal_error", f"Input should be {', '.join(others)} or {last}")
    return name


def _sources(value: Any) -> Any:
    """Convert one path, one source or a list of both to a list of sources; nothing is none."""
    value = [] if value is None else value
    items = value if isinstance(value, list | tuple) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


def _fraction_or_sources(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return _sources(value)
    written = str(value).strip()
    if isinstance(value, str) and not (written[:1].isdigit() and written[-1:] in "%0123456789."):
        return _sources(value)
    return parse_fraction(value)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _conversations(value: Any) -> Any:
    """Convert a text, a list of turns, or a list of either to a list of conversations. A text is a user's turn."""
    items = value if isinstance(value, list | tuple) else [value]
    items = [items] if items and all(isinstance(item, dict) for item in items) else items
    return [[{"role": "user", "content": item}] if isinstance(item, str) else item for item in items]


Count = Annotated[int, BeforeValidator(parse_count)]
Length = Annotated[int, BeforeValidator(parse_length)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
Tracker = Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio"]
PathText = Annotated[str, AfterValidator(_findable)]
Decay = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)]
Every = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
Nodes = Annotated[str, BeforeValidator(parse_nodes, json_schema_input_type=int | str)]
# A number of steps, a part of the run between 0 and 1, or auto.
Steps = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)] | float, BeforeValidator(parse_steps)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True
    )


def of_layout(name: str) -> Any:
    """The run file's key for a field of `Layout`, with the field's default, bounds and description. `Layout` itself
    checks the values of its own section."""
    key = KEYS[name]
    is_own = key.section == "layout"
    return Field(
        default=key.file_default,
        description=key.help,
        ge=None if is_own else key.least,
        le=None if is_own else key.most,
        json_schema_extra={"enum": list(key.choices)} if is_own and key.choices else None,
    )


def _type(key: LayoutKey) -> Any:
    if key.section == "layout" or not (key.choices or key.text):
        return {int: Whole, bool: bool, str: str}[type(key.file_default)]
    if key.text:
        named = key.default, *key.words.values()
        return Literal[named] | Annotated[str, Field(pattern=f"^{key.pattern}$", description=key.text)]
    return Literal[key.choices]


def with_layout_keys(section: str, base: type[BaseModel] = Section) -> Any:
    """`base` with the keys that features declare for a section of the run file, behind its own."""
    names = [name for name, key in KEYS.items() if key.section == section and key.name not in base.model_fields]
    names = moved(names, lambda name: KEYS[name].file_after)
    fields: dict[str, Any] = {KEYS[name].name: (_type(KEYS[name]), of_layout(name)) for name in names}
    return create_model(base.__name__, __base__=base, **fields)


class ModelSection(Section):
    name_or_path: PathText = Field(
        default="demo", min_length=1, description="hub id, local Hugging Face folder, config.json or built-in shape"
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="where the first weights come from; not set, and a built-in shape: random"
    )
    overrides: dict[str, Any] = Field(default={}, description="keys of the model's config.json to set")


class TokenizerSection(Section):
    name_or_path: PathText = Field(
        default="auto",
        min_length=1,
        description="auto: the model's (of a built-in shape: train:2048); byte: built in; train:8192: BPE of that many "
        "tokens, trained on data.train; or a name or path",
    )

    @field_validator("name_or_path")
    @classmethod
    def _resolve_size(cls, value: str) -> str:
        kind, colon, size = value.partition(":")
        if kind != "train" or not colon:
            return value
        if parse_length(size) < 257:
            raise ValueError(f"{value} is too small: a byte-level vocabulary has 257 tokens or more")
        if parse_length(size) > MOST_VOCABULARY:
            raise ValueError(f"{value} is too large: at most {MOST_VOCABULARY} tokens")
        return f"train:{parse_length(size)}"


class DataSource(Section):
    path: PathText = Field(
        min_length=1, description="file, folder, glob, tokens, hub:org/name?split=S or python-stdlib"
    )
    format: str = Field(
        default="auto",
        description="auto (by the name's ending), txt, jsonl, json, csv, parquet, tokens; of records: chat (or "
        "sharegpt), alpaca, completion, preference",
    )
    text_key: str = Field(default="text", description="key that holds the text of a record")
    columns: dict[
        Literal[
            "messages", "prompt", "input", "completion", "system", "history", "tools", "chosen", "rejected", "label"
        ],
        str,
    ] = Field(
        default={},
        description="keys of a record's parts: messages, prompt, input, completion, system, history, tools, chosen, "
        "rejected, label",
    )
    train_on: Literal["assistant", "all", "last"] = Field(
        default="assistant", description="what of an example is trained: every answer, all of it, the last answer"
    )
    weight: Number = Field(
        default=1.0, gt=0, description="how often its documents are read, relative to those of the other sources"
    )


_Sources = str | DataSource | list[str | DataSource]  # the accepted forms


class DataSection(Section):
    train: Annotated[tuple[DataSource, ...], BeforeValidator(_sources, json_schema_input_type=_Sources)] = Field(
        default=(), description="training text: a path, or a list of sources; the model demo alone has text of its own"
    )
    validation: Annotated[
        float | tuple[DataSource, ...],
        BeforeValidator(_fraction_or_sources, json_schema_input_type=float | _Sources),
    ] = Field(default=0.01, description="held-out part of the documents (1%, 0 = none), or a list of sources")
    seq_length: Length = Field(
        default=8192,
        ge=1,
        le=2**31,
        description="tokens per row; 8k = 8192; not set: at most a built-in shape's positions",
    )
    packing: bool = Field(
        default=True, description="several whole documents per row; attention never crosses a document"
    )
    bos: Literal["auto"] | bool = Field(
        default="auto", description="BOS in front of each document: auto (as the tokenizer does), true, false"
    )
    streaming: bool = Field(
        default=False, description="tokenise while training; rows are shuffled within windows of the text"
    )
    balance_rows: bool = Field(
        default=False,
        description="share the rows of a global batch out over data ranks by what their documents cost, in place of "
        "by order; the batch and its loss stay the same",
    )
    balance_documents: Whole = Field(
        default=1, ge=1, le=MOST_RING,
        description="put the documents of each row in an order in which this many ranks of cp attend equally much; "
        "1 = as packed; set it to layout.cp",
    )  # fmt: skip

    @property
    def fraction(self) -> float:
        """The held-out part of the documents; 0 with a validation list."""
        return 0.0 if isinstance(self.validation, tuple) else self.validation


class TrainSection(Section):
    max_steps: Count | None = Field(
        default=None, ge=1, description="optimizer steps; 1000 when neither max_tokens nor max_epochs is set"
    )
    max_tokens: Count | None = Field(default=None, ge=1, description="tokens of training, instead of max_steps; 500M")
    max_epochs: Number | None = Field(
        default=None, gt=0, description="passes over the training rows, instead of max_steps; 2.5"
    )
    global_batch_size: Whole = Field(
        default=64, ge=1, le=MOST_ROWS, description="rows per optimizer step, over all devices"
    )
    micro_batch_size: Whole = of_layout("micro_batch_size")
    seed: Whole = Field(default=1234, ge=0, description="fixes the initial weights and the order of the rows")
    compile: Literal["auto"] | bool = Field(
        default="auto", description="torch.compile of each block: auto, true, false"
    )
    attention: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="kernels: fa2 are PyTorch's own; fa3 is FlashAttention 3, for GPUs of compute capability 9.0 "
        "(H100), a package of its own; auto takes fa3 where it is installed, and on a CPU the kernel of fivefold",
    )
    neftune_noise_alpha: Number | None = Field(
        default=None,
        gt=0,
        description="noise on the embeddings in training, within alpha / sqrt(tokens of the document * hidden size): "
        "NEFTune; 5",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is one")
    collective_timeout: Number = Field(
        default=600, ge=0, description="seconds until a collective that hangs ends the run; 0 = never"
    )
    check_every: Every = Field(
        default=100, description="optimizer steps between the standing checks of replicas, movement and rows; 0 = never"
    )
    max_restarts: Whole = Field(
        default=3, ge=0, description="restarts after a worker died, without a new checkpoint in between"
    )
    nodes: Nodes | None = Field(
        default=None,
        description="nodes that train together, with one fivefold train on each: 2, or the least and the most, 2:4, to "
        "go on with those that are left; not set: this machine alone, or what torchrun or srun has started",
    )

    parts: Names = Field(
        default=(),
        description="parts of the user's own, FILE.py:NAME: classes that derive fivefold.Part, called at moments of a "
        "step; see fivefold docs howto/parts",
    )

    leave_out: bool = Field(
        default=False,
        description="with train.nodes: leave out a node that the standing checks name, for wrong weights or rows or as "
        "a straggler, if the others suffice; otherwise wrong ones end the run, and stragglers are named alone",
    )

    @property
    def node_range(self) -> tuple[int, int] | None:
        """The least and the most of `nodes`; None if it is not set."""
        if self.nodes is None:
            return None
        least, _, most = self.nodes.partition(":")
        return int(least), int(most or least)

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = [key for key in LENGTHS if values.get(key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} set; keep one")
        return values if given else {**values, "max_steps": DEFAULT_MAX_STEPS}


class LaunchSection(Section):
    timeout: Number = Field(
        default=1800, gt=0, description="seconds that ranks wait for those that torchrun or srun has yet to start"
    )


class ObjectiveSection(Section):
    """The objective of the training; `training/objectives.py` has the formulas."""

    name: Annotated[str, AfterValidator(lambda name: _known((*OF_TEXTS, *OBJECTIVES), name))] = Field(
        default="sft",
        description="sft: the likelihood of the text; distill: and what a teacher says; of pairs of answers: dpo, ipo, "
        "orpo, simpo; of rated ones: kto; python: a function of your own",
        json_schema_extra={"enum": [*OF_TEXTS, *OBJECTIVES], "type": "string"},
    )
    path: PathText = Field(
        default="",
        description="python: file and name of the function, my_loss.py:loss, relative to the run file; it is run",
    )
    columns: Names = Field(
        default=(), description="python: keys of numbers in the records of the data, which the function gets: [weight]"
    )
    beta: Number = Field(
        default=0.1, gt=0, description="temperature of a preference objective; the weight of the odds ratio in orpo"
    )
    gamma: Number = Field(default=0.5, ge=0, description="margin between the two answers in simpo")
    desirable_weight: Number = Field(default=1.0, ge=0, description="weight of desirable answers in kto")
    undesirable_weight: Number = Field(default=1.0, ge=0, description="weight of undesirable answers in kto")
    reference: PathText = Field(
        default="auto",
        description="model that dpo, ipo and kto compare with: base (the first weights), a folder or hub id, or none; "
        "auto: base where one is needed",
    )
    teacher: PathText = Field(
        default="", description="distill: folder or hub id of the model to follow, with the same vocabulary"
    )
    top_k: Whole = Field(
        default=64, ge=1, description="distill: tokens of the teacher that are followed at each target"
    )
    temperature: Number = Field(default=1.0, gt=0, description="distill: what logits of both models are divided by")
    alpha: Number = Field(
        default=0.5, ge=0, le=1, description="distill: part of the loss that is the teacher's; the rest is the text's"
    )

    @property
    def has_answers(self) -> bool:
        """True if the objective is defined on answers, in pairs or rated, instead of text."""
        return self.name in OBJECTIVES

    @property
    def is_rated(self) -> bool:
        """True if single answers are rated, in place of pairs."""
        return self.has_answers and OBJECTIVES[self.name].is_rated

    @property
    def is_own(self) -> bool:
        return self.name == "python"

    @property
    def compares(self) -> bool:
        return self.has_answers and OBJECTIVES[self.name].needs_reference

    @model_validator(mode="after")
    def _fits(self) -> "ObjectiveSection":
        if (self.name == "distill") != bool(self.teacher):
            needed, unused = "distill needs objective.teacher, a folder or hub id", f"{self.name} uses no teacher"
            raise ValueError(unused if self.teacher else needed)
        if self.is_own != bool(self.path):
            needed, unused = "python needs objective.path: my_loss.py:loss", f"{self.name} runs no code of a path"
            raise ValueError(unused if self.path else needed)
        if self.columns and not self.is_own:
            raise ValueError(f"columns are for a function of your own, name: python, and {self.name} reads none")
        if self.compares and self.reference == "none":
            raise ValueError(f"reference is none, and {self.name} compares with one; name: orpo or simpo needs none")
        if not self.compares and self.reference not in ("auto", "none"):
            raise ValueError(f"reference is {self.reference}, which {self.name} does not use; leave it out")
        return self


class AdapterSection(Section):
    """The adapter that is trained on a frozen model; `parallel/adapters/sources.py` has the formula."""

    name: Literal["none", "lora"] = Field(
        default="none", description="none: the whole model is trained; lora: two small matrices beside each linear"
    )
    rank: Whole = Field(default=16, ge=1, description="rows of A, columns of B")
    alpha: Number = Field(default=32.0, gt=0, description="their product is multiplied by alpha / rank")
    targets: Names = Field(
        default=(AUTO,),
        description="linears by the ends of their names, such as [q_proj, v_proj]; auto: all of the layers but routers "
        "and experts",
    )
    target_parameters: Names = Field(
        default=(), description="matrices of experts by the ends of their names: [gate_up_proj, down_proj]"
    )
    rslora: bool = Field(default=False, description="multiply by alpha / sqrt(rank)")
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4: the frozen weights that have an adapter rest in four bits (QLoRA)"
    )
    dropout: Number = Field(
        default=0.0, ge=0, lt=1, description="share of the elements dropped of the input of A, in training"
    )
    path: PathText = Field(default="", description="folder of a PEFT adapter to start from; empty: a new one")

    @model_validator(mode="before")
    @classmethod
    def _built(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values and "name" not in values:
            raise ValueError(f"{next(iter(values))} is of an adapter, and there is none without name: lora")
        if values.get("name") == "dora":
            raise ValueError("dora is not built; lora is")
        if values.get("name") == "qlora":
            raise ValueError("qlora is name: lora with quantize: nf4")
        return values

    @model_validator(mode="after")
    def _beside_something(self) -> "AdapterSection":
        if not (self.targets or self.target_parameters):
            raise ValueError("targets: name some linears, or auto; or experts by target_parameters")
        return self

    @property
    def lora(self) -> Lora | None:
        """The LoRA options; None if the whole model is trained."""
        if self.name != "lora":
            return None
        return Lora(
            self.rank, self.alpha, self.targets, self.rslora, self.quantize, self.target_parameters, self.dropout
        )


class OptimizerSection(Section):
    name: Annotated[str, AfterValidator(lambda name: _known(OPTIMIZERS, name))] = Field(
        default="adamw",
        description="adamw; muon: for the matrices of the blocks, AdamW for the rest; python: a class of your own",
        json_schema_extra={"enum": list(OPTIMIZERS), "type": "string"},
    )
    path: PathText | None = Field(
        default=None,
        description="python: file and name of the class, my_optimizer.py:Lion, relative to the run file; it is run",
    )
    options: dict[str, Any] | None = Field(
        default=None, description="python: arguments of the class beside lr and weight_decay: {betas: [0.9, 0.99]}"
    )
    learning_rate: Number = Field(default=2e-5, ge=0, description="peak learning rate, per optimizer step")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="decay rates of the two moments, per step")
    eps: Number = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: Number = Field(
        default=0.1, ge=0, description="decoupled decay; norms and biases are exempt; python: 0 unless it is set"
    )
    max_grad_norm: Number = Field(
        default=1.0, ge=0, description="clips the norm of the whole gradient; 0 = no clipping"
    )
    momentum: Decay | None = Field(
        default=None, description="muon: decay rate of the momentum, per step; not set: 0.95; AdamW has betas"
    )
    ns_steps: Whole | None = Field(
        default=None, ge=1, description="muon: Newton-Schulz iterations of an update; not set: 5"
    )
    state_dtype: StateDtype = of_layout("state_dtype")

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, values: Any) -> Any:
        """Set defaults of optimizer-specific keys. Raises `ValueError` for a key that this optimizer does not have."""
        facts = OPTIMIZERS.get(str(values.get("name", "adamw"))) if isinstance(values, dict) else None
        if facts is None:
            return values
        for key in values:
            if values[key] is not None and key not in facts.keys and (owners := with_key(key)):
                whose = f"{' and '.join(owners)} {'has' if len(owners) == 1 else 'have'}"
                raise ValueError(f"{key} is set, which only {whose}; set name: {owners[0]}, or leave it out")
        plain = {"weight_decay": 0.0} if facts.name == "python" else {}  # a class need not have any
        return {**plain, **values, **{key: default for key, default in facts.keys.items() if values.get(key) is None}}

    @model_validator(mode="after")
    def _is_named(self) -> "OptimizerSection":
        if not self.is_own:
            return self
        if not self.path:
            raise ValueError("python needs optimizer.path: my_optimizer.py:Lion")
        fields = type(self).model_fields
        for key in ("betas", "eps"):
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is set, which a class of your own gets by options: {{{key}: ...}}")
        for key, instead in {"lr": "learning_rate", "weight_decay": "weight_decay"}.items():
            if key in (self.options or {}):
                raise ValueError(f"options has {key}, which is optimizer.{instead}: set that instead")
        return self

    @property
    def is_own(self) -> bool:
        return self.name == "python"

    @property
    def title(self) -> str:
        """Its name; of a class of the user's own, its file's and its own: `my_optimizer.py:Lion`."""
        return self.name if self.path is None else Path(self.path).name


class SchedulerSection(Section):
    name: Annotated[str, AfterValidator(lambda name: _known(SCHEDULES, name))] = Field(
        default="cosine",
        description="shape after the warm-up; wsd: constant, then linear over the last tenth of the run",
        json_schema_extra={"enum": list(SCHEDULES), "type": "string"},
    )
    warmup_steps: Steps = Field(
        default="auto",
        description="optimizer steps up to the peak learning rate, or a part of the run: 5%; auto: 5%, at most 100",
    )
    min_lr_ratio: Number = Field(
        default=0.1, ge=0, le=1, description="learning rate after the last step, as a part of the peak"
    )


class _PlannerKeys(Section):
    auto: bool = Field(default=False, description="the planner chooses what is not set of the layout; layout: auto")
    hardware: str = Field(
        default="", description="hardware file (fivefold calibrate) that the planner uses; not set: its own tables"
    )


class LayoutSection(with_layout_keys("layout", _PlannerKeys)):  # type: ignore[misc]
    """The part of a `Layout` written under `layout:`; `Layout` itself checks the values."""


class _Dtypes(Section):
    compute: Compute = of_layout("precision")
    reduce: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of the gradient reduction")


class PrecisionSection(with_layout_keys("precision", _Dtypes)):  # type: ignore[misc]
    pass


class MemorySection(with_layout_keys("memory")):  # type: ignore[misc]
    loss_chunks: Literal["auto"] | Whole = Field(default="auto", description="pieces of the loss; auto or a number")
    trial: Literal["auto"] | bool = Field(
        default="auto",
        description="take the memory of a step, an evaluation and a save before the first step: auto (on a GPU), "
        "true, false",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, values: Any) -> Any:
        """Drop removed keys at their defaults."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in REMOVED or value != REMOVED[key][0]}

    @field_validator("loss_chunks")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("pieces are 1 or more")
        return value

    @property
    def chunks(self) -> int | None:
        """`loss_chunks` as a number; None for auto, which depends on the sizes of a step."""
        return None if self.loss_chunks == "auto" else self.loss_chunks


class BalanceSection(Section):
    """Load balancing of the experts; `parallel/balance/runtime.py` explains each method."""

    aux_loss: Literal["auto"] | Number = Field(
        default="auto", description="coefficient of the loss for uneven load; auto = the model's, if it asks for one"
    )
    z_loss: Number = Field(default=0.0, ge=0, description="coefficient of the loss for large router logits")
    bias_rate: Number = Field(
        default=0.0, ge=0, description="what a step adds to a router's correction bias, or takes from it"
    )
    capacity_factor: Number | None = Field(
        default=None, gt=0, description="an expert takes so many times its even share of a row; null = all"
    )


class CheckpointSection(Section):
    every: Every = Field(default=250, description="optimizer steps between checkpoints; 0 = only the last")
    keep: Whole = Field(default=3, ge=1, description="newest checkpoints kept")
    keep_best: Whole = Field(
        default=0,
        ge=0,
        le=MOST // 2,
        description="checkpoints of the best validations by eval.metric kept beside them, saved as they are made",
    )
    asynchronous: bool = Field(
        default=True,
        alias="async",
        description="write while training goes on, from a copy in memory",
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="auto goes on from the newest checkpoint that agrees"
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue", description="what a run does when a checkpoint cannot be written, but for the last"
    )
    remote: str | None = Field(
        default=None, description="where checkpoints are copied to, such as s3://bucket/runs; what fsspec knows"
    )
    export_hf: bool | Literal["best"] = Field(
        default=False, description="write a Hugging Face folder at the end: true: of the last step; best: of the best"
    )

    @field_validator("remote")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"{value} is no address such as s3://bucket/runs (a local one is file:///path)")
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("an address holds no password; the storage's own variables and files are for that")
        return value


class _OuterKeys(Section):
    learning_rate: Number = Field(default=0.7, gt=0, description="of SGD on the outer weights, per outer step")
    momentum: Decay = Field(default=0.9, description="decay rate of its momentum, per outer step")
    nesterov: bool = Field(default=True, description="Nesterov momentum")


class OuterSection(with_layout_keys("outer", _OuterKeys)):  # type: ignore[misc]
    """Outer steps of replicas that train apart (DiLoCo); `parallel/outer/runtime.py` explains them."""


class StopSection(Section):
    patience: Whole = Field(
        default=0, ge=0, description="validations in a row without an improvement that end the run; 0 = never"
    )
    min_delta: Number = Field(
        default=0.0, ge=0, description="an improvement is a change of eval.metric by more than this, in its unit"
    )


class EvalSection(Section):
    every: Every = Field(default=250, description="optimizer steps between evaluations; 0 = never")
    max_tokens: Count = Field(default=1_000_000, ge=1, description="tokens of one evaluation; 1M")
    metric: Literal[tuple(METRICS)] = Field(  # type: ignore[valid-type]
        default="eval/loss", description="metric by which validations are compared"
    )
    mode: Literal["auto", "min", "max"] = Field(
        default="auto", description="which of its values are better; auto: smaller losses, larger rewards"
    )
    stop: StopSection = Field(default=StopSection(), description="early stopping")

    @property
    def direction(self) -> Literal["min", "max"]:
        return METRICS[self.metric] if self.mode == "auto" else self.mode


class SampleSection(Section):
    every: Every = Field(default=250, description="optimizer steps between samples; 0 = never")
    prompts: Names = Field(default=(), description="texts to continue")
    messages: Annotated[
        tuple[tuple[dict[str, Any], ...], ...],
        BeforeValidator(_conversations, json_schema_input_type=str | list[str | dict[str, Any] | list[dict[str, Any]]]),
    ] = Field(
        default=(),
        description="conversations to answer through the chat template: each a user's text, or a list of turns "
        "with role and content",
    )
    file: PathText = Field(
        default="", description="more of both, the first 16: .jsonl with prompt or messages, or a text with one a line"
    )
    max_new_tokens: Count = Field(default=48, ge=1, description="tokens of a sample, at most")

    @property
    def is_on(self) -> bool:
        return self.every > 0 and bool(self.prompts or self.messages or self.file)


class LogSection(Section):
    every: Annotated[Every, Field(ge=1)] = Field(default=1, description="optimizer steps between metrics rows")
    to: Annotated[tuple[Tracker, ...], BeforeValidator(_listed, json_schema_input_type=Tracker | list[Tracker])] = (
        Field(
            default=("jsonl",),
            description="where metrics go, such as [jsonl, wandb]; all but jsonl need the package of that name",
        )
    )


class RunSection(Section):
    name: PathText = Field(default="demo", min_length=1, description="name of the run, and of its folder")
    dir: PathText = Field(default="runs", min_length=1, description="folder that holds the runs")

    @field_validator("name")
    @classmethod
    def _is_a_folder_s_name(cls, value: str) -> str:
        """Check that a name gives one new folder inside of `run.dir`, and is printable. Raises `ValueError`."""
        if value in (".", "..") or "/" in value or "\\" in value:
            raise ValueError(f"{value!r} is a path; a name is one word, and run.dir is where the folder goes")
        return _printable(value)

    @field_validator("dir")
    @classmethod
    def _is_shown(cls, value: str) -> str:
        return _printable(value)


class RunConfig(Section):
    """A resolved run file. `layout` is assembled from the section of that name and the options kept elsewhere."""

    model: ModelSection = Field(default=ModelSection())
    tokenizer: TokenizerSection = Field(default=TokenizerSection())
    data: DataSection = Field(default=DataSection())
    train: TrainSection = Field(default=TrainSection())
    launch: LaunchSection = Field(default=LaunchSection())
    objective: ObjectiveSection = Field(default=ObjectiveSection())
    adapter: AdapterSection = Field(default=AdapterSection())
    optimizer: OptimizerSection = Field(default=OptimizerSection())
    scheduler: SchedulerSection = Field(default=SchedulerSection())
    layout_section: LayoutSection = Field(default=LayoutSection(), alias="layout")
    precision: PrecisionSection = Field(default=PrecisionSection())
    memory: MemorySection = Field(default=MemorySection())
    balance: BalanceSection = Field(default=BalanceSection())
    outer: OuterSection = Field(default=OuterSection())
    checkpoint: CheckpointSection = Field(default=CheckpointSection())
    eval: EvalSection = Field(default=EvalSection())
    sample: SampleSection = Field(default=SampleSection())
    log: LogSection = Field(default=LogSection())
    run: RunSection = Field(default=RunSection())

    @model_validator(mode="before")
    @classmethod
    def _complete_shape(cls, values: Any) -> Any:
        """Set unset keys for a built-in shape, which has no weights and no tokenizer: init, tokenizer, row length; and
        for the demo its text."""
        model, tokenizer, data = (_section(values, name) for name in ("model", "tokenizer", "data"))
        if model is None or tokenizer is None or data is None:
            return values
        demo = ModelSection().name_or_path
        name = str(model.get("name_or_path", demo))
        folder = shape_folder(name)
        if folder is None:
            return values
        if name == demo and "train" not in data:
            data = {**data, "train": DEMO_TEXT}
        if tokenizer.get("name_or_path", "auto") == "auto":
            tokenizer = {**tokenizer, "name_or_path": SHAPE_TOKENIZER}
        if "seq_length" not in data and (longest := _positions(folder, model)):
            data = {**data, "seq_length": min(longest, DataSection().seq_length)}
        return {**values, "model": {"init": "random", **model}, "tokenizer": tokenizer, "data": data}

    @property
    def layout(self) -> Layout:
        """The layout of the run. Raises `UserError` if a degree or an option is out of its range, or if the planner has
        yet to choose the layout."""
        if self.is_automatic:
            raise UserError(
                "layout: auto is chosen when training starts",
                fix="name a layout such as shard2.tp2; fivefold plan and fivefold train choose one",
                more="fivefold docs howto/plan",
            )
        return self.written_layout

    @property
    def is_automatic(self) -> bool:
        """True if the planner is to choose the layout (`planner/of_run.py`)."""
        return bool(self.layout_section.auto)

    @property
    def hardware(self) -> str:
        """The planner's file with the performance of the run's devices; "" for its own tables."""
        return str(self.layout_section.hardware)

    @property
    def written_layout(self) -> Layout:
        """The layout as written in the run file. Raises `UserError` for a value out of its range."""
        return Layout(**{name: getattr(section, key) for name, (section, key) in self._of_layout().items()})

    @property
    def given(self) -> dict[str, Any]:
        """The fields of the layout that the run file sets, with their values. The planner does not change them."""
        places = self._of_layout().items()
        return {name: getattr(section, key) for name, (section, key) in places if key in section.model_fields_set}

    def with_layout(self, layout: Layout) -> "RunConfig":
        """The same run with `layout` as explicit keys."""
        values: dict[str, dict[str, Any]] = {"layout": {"auto": False}}
        for name, key in KEYS.items():
            values.setdefault(key.section, {})[key.name] = getattr(layout, name)
        sections = {_attribute(name): keys for name, keys in values.items()}
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        )

    def _of_layout(self) -> dict[str, tuple[Section, str]]:
        """Field of `Layout` -> its section of the run file, and its key there."""
        return {name: (getattr(self, _attribute(key.section)), key.name) for name, key in KEYS.items()}

    @property
    def code(self) -> dict[str, str]:
        """The code of the user's own that a run executes, `PATH.py:NAME` by key."""
        return {name: text for place in CODE for name, text in self.code_of(*place).items()}

    def code_of(self, section: str, key: str) -> dict[str, str]:
        """That of one key: of `train.parts` by `train.parts[0]` and so on."""
        return code_named(section, key, getattr(getattr(self, section), key))

    @property
    def run_dir(self) -> Path:
        """The run folder, `run.dir/run.name`."""
        return Path(self.run.dir) / self.run.name

    def to_yaml(self) -> str:
        """The resolved run file; `load_config` reads it back to an equal config."""
        tree = self.model_dump(mode="json", by_alias=True)
        return str(yaml.dump(tree, Dumper=ExactDumper, sort_keys=False, allow_unicode=True))


def _attribute(section: str) -> str:
    return "layout_section" if section == "layout" else section


class ExactDumper(yaml.SafeDumper):
    """Quotes texts with Unicode line breaks, so that they are read back: unquoted, YAML turns some into spaces."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if {"\x85", "\u2028", "\u2029"} & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


ExactDumper.add_representer(str, _represent_text)


def _section(values: Any, name: str) -> dict[str, Any] | None:
    """A section as written, empty if it was not; None if the value is not a section."""
    section = values.get(name, {}) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else None


def _positions(folder: Path, model: dict[str, Any]) -> int | None:
    """Positions of a shape with its overrides; None if the config does not say."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    overrides = model.get("overrides")
    positions = (values | overrides if isinstance(overrides, dict) else values).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else None


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file (None: the built-in demo; a run folder: its own) and set `key=value` overrides on top.

    Precedence: defaults, then the file, then the overrides in order. Overrides that name another model replace the
    demo entirely. Raises `UserError` with the file and line of the key, the likely fix and where to read more.
    """
    if path is None:
        file = RunFile.read(DEMO, name="built-in demo.yaml").overridden(overrides)
        if (_section(file.tree, "model") or {}).get("name_or_path") != ModelSection().name_or_path:
            file = RunFile(COMMAND_LINE).overridden(overrides)
    else:
        file = RunFile.of_run(Path(path)) if Path(path).is_dir() else RunFile.read(Path(path))
        file.overridden(overrides)
    base = Path() if path is None else Path(path)
    file.locate_code(base if base.is_dir() else base.parent)
    try:
        config = RunConfig.model_validate(file.tree)
    except ValidationError as error:
        raise explained(error, file, list(keys())) from None
    try:
        config.written_layout  # noqa: B018  (assembled here so that its errors carry the file's name)
    except UserError as error:
        place = file.place(("layout", error.what.split()[0]))
        raise UserError(f"{place} layout: {error.what}", fix=error.fix, more=READ_MORE) from None
    return config


def parse_config(text: str) -> RunConfig:
    """Read a config from the output of `to_yaml`, in which a resolved run file travels to another process, or that of
    an earlier version, which a checkpoint has: how that run was computed by a removed key does not matter any more."""
    tree = yaml.safe_load(text)
    tree["memory"] = {key: value for key, value in tree.get("memory", {}).items() if key not in REMOVED}
    return RunConfig.model_validate(tree)


def check_supported(config: RunConfig) -> None:
    """Raise `UserError` for a valid run file that cannot be run: not legal, or a package is not installed.

    The model is checked only for experts, and only if its config.json is local; `check_model` checks the rest.
    """
    layout = config.written_layout
    # The planner's choice is legal as a whole; the part that the file sets need not be.
    refuse(() if config.is_automatic else layout.violations())
    if layout.ep > 1 or layout.etp > 1:
        refuse(ExpertKeys.model_violations(layout, _limits(config.model)))
    for package in config.log.to:  # trackers have the names of their packages
        if package != "jsonl" and find_spec(package) is None:
            raise UserError(
                f"log.to names {package}, which is not installed", fix=f"pip install {package}", more=READ_MORE
            )
    check_best(config)
    check_code(config)
    check_streaming(config)
    _check_outer(config)
    if config.objective.compares and config.balance.capacity_factor is not None:
        raise UserError(
            f"objective.name {config.objective.name} with balance.capacity_factor: the reference drops no tokens, and "
            "a step would",
            fix="leave balance.capacity_factor out",
            more="fivefold docs howto/preferences",
        )
    if config.objective.has_answers and config.train.neftune_noise_alpha is not None:
        raise UserError(
            f"objective.name {config.objective.name} with train.neftune_noise_alpha: it compares passes of the model, "
            "which draw no noise",
            fix="leave train.neftune_noise_alpha out",
            more="fivefold docs explain/dropout",
        )
    if config.model.init == "pretrained" and shape_folder(config.model.name_or_path):
        raise UserError(
            f"model.init is pretrained, but {config.model.name_or_path} is a built-in shape, which has no weights",
            fix="set model.init: random, or name a Hugging Face folder or hub id",
            more=READ_MORE,
        )


def check_named(config: RunConfig) -> None:
    if not config.data.train:
        raise UserError(
            "data.train is not set: no text to train on is named",
            fix='name your own: data: {train: "texts/*.jsonl"} in the run file, or data.train=notes.txt behind it',
            more="fivefold docs howto/data, 'Name the sources'",
        )


def check_streaming(config: RunConfig) -> None:
    """Raise `UserError` for `data.streaming` with a key that needs all rows before the first step."""
    if not config.data.streaming:
        return
    objective, tokenizer = config.objective.name, config.tokenizer.name_or_path
    asked = {
        "train.max_epochs": (config.train.max_epochs, "the number of rows is not known", "set train.max_tokens"),
        f"tokenizer.name_or_path: {tokenizer}": (
            tokenizer.startswith("train:"),
            "the tokenizer is trained on all of data.train",
            "name a tokenizer that is there",
        ),
        "weights of sources": (
            len({source.weight for source in config.data.train}) > 1,
            "an epoch reads every unit of text once",
            "leave data.train[].weight out",
        ),
        f"objective.name: {objective}": (
            config.objective.has_answers or objective == "distill",
            "it computes numbers of all rows before the first step",
            "train on texts, conversations or prompts with answers",
        ),
    }
    for what, (is_asked, why, fix) in asked.items():
        if is_asked:
            raise UserError(
                f"data.streaming with {what}: {why}",
                fix=f"{fix}, or set data.streaming: false",
                more="fivefold docs howto/data, 'Tokenise while training'",
            )


def _check_outer(config: RunConfig) -> None:
    """Raise `UserError` for outer steps with what needs replicas that are the same at every step."""
    every, more = config.outer.every, "fivefold docs explain/outer"
    if not every:
        if config.outer != OuterSection():
            raise UserError(
                "outer is set, and outer.every is 0", fix="set outer.every: 50, or leave outer out", more=more
            )
        return
    if config.optimizer.name == "muon":
        raise UserError(
            f"outer.every {every} with optimizer.name: muon: replicas share the work on its matrices, and these differ",
            fix="set optimizer.name: adamw, or leave outer.every out",
            more=more,
        )
    looks = {
        "eval.every": config.eval.every if config.data.validation else 0,
        "sample.every": config.sample.every if config.sample.is_on else 0,
    }
    for key, steps in looks.items():
        if steps % every:
            raise UserError(
                f"{key} {steps} is no multiple of outer.every {every}: in between, replicas have weights of their own",
                fix=f"set {key}: {max(steps // every, 1) * every}, or 0",
                more=more,
            )


def check_best(config: RunConfig, *, has_validation: bool = True) -> None:
    """Raise `UserError` if the run compares validations and has none, or none with its `eval.metric`. `has_validation`:
    False if no document was held out."""
    asks = {
        "checkpoint.keep_best": config.checkpoint.keep_best > 0,
        "eval.stop.patience": config.eval.stop.patience > 0,
        "checkpoint.export_hf: best": config.checkpoint.export_hf == "best",
    }
    asked = next((key for key, is_set in asks.items() if is_set), None)
    if asked is None:
        return
    metric, objective = config.eval.metric, config.objective
    what, fix = "", "eval.metric: eval/loss"
    if config.checkpoint.export_hf == "best" and not config.checkpoint.keep_best:
        what, fix = "checkpoint.keep_best is 0, so the best may be gone at the end", "checkpoint.keep_best: 1"
    elif not config.eval.every:
        what, fix = "eval.every is 0: there are no validations to compare", "set eval.every to a number of steps"
    elif metric.startswith("eval/") and not (has_validation and config.data.validation):
        what, fix = "no text is held out", "set data.validation to a part of the documents, or to files"
    elif "rewards" in metric and not objective.has_answers:
        what = f"eval.metric {metric} is one of answers, and objective.name is {objective.name}"
    elif metric == "eval/rewards/accuracies" and objective.is_rated:
        what, fix = (
            f"{metric} is one of pairs of answers, and {objective.name} rates single ones",
            "eval.metric: eval/rewards/margins",
        )
    if what:
        raise UserError(f"{asked} is set, but {what}", fix=fix, more="fivefold docs howto/best")


_PAGES = {"objective.path": "losses", "optimizer.path": "optimizers", "train.parts": "parts"}


def check_code(config: RunConfig) -> None:
    """Raise `UserError` if code that the run file names is not there, or in the folder of the model."""
    for key, text in config.code.items():
        code, model = NamedCode.read(text, key), Path(config.model.name_or_path)
        if model.is_dir() and code.path.resolve().is_relative_to(model.resolve()):
            raise UserError(
                f"{key}: {code.path} is in the folder of the model, and nothing there is run",
                fix="read it, and put it beside the run file",
                more=f"docs/howto/{_PAGES[key.partition('[')[0]]}.md",
            )


def _limits(model: ModelSection) -> ModelLimits:
    """The limits in a local config.json; `UNKNOWN` for a hub id, which is looked up later."""
    path = Path(shape_folder(model.name_or_path) or model.name_or_path)
    if not path.exists():
        return UNKNOWN
    return ModelLimits.of_config(read_folder_config(path) | model.overrides, model.name_or_path)


def keys() -> Iterator[Key]:
    return keys_of(RunConfig)
