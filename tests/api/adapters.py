"""A loop of one's own over an adapter: that of `peft` on plain `transformers`, and under a layout."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fivefold as ff
from fivefold.verification.by_hand import exact
from tests.api.loop import CLIP, STEPS, Outcome, as_numpy, build, mean_loss, share

RATE = 3e-2


def of_peft(folder: Path | None = None) -> Any:
    """The model of `peft`: with a new adapter, neither matrix of which is zero, or with that of a folder."""
    import peft

    model = build("llama")
    if folder is not None:
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).double()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=7, use_rslora=True, target_modules=["q_proj", "o_proj", "down_proj"]
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def plain(name: str) -> str:
    """A parameter of `peft` as it is called here."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def reference(model: Any) -> Outcome:
    """`STEPS` steps of AdamW in one process."""
    trained = {plain(name): p for name, p in model.named_parameters() if p.requires_grad}
    update = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.1)
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        with exact():
            loss = mean_loss(model, share(at, 0, 1))
            loss.backward()
        outcome.losses.append(loss.item())
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        update.step()
        update.zero_grad()
    outcome.weights = {name: p.detach().numpy().copy() for name, p in trained.items()}
    return outcome


def train_on_rank(layout: str, adapter: Path, out: Path) -> tuple[Outcome, int]:
    """The same from the folder of an adapter; saved and exported."""
    model = ff.parallelize(build("llama"), layout, adapter=adapter)
    update = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        with exact():
            result = ff.train_step(model, update, share(at, model.data_rank, model.data_ranks), max_grad_norm=CLIP)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.weights = as_numpy(ff.gather(model))
    ff.save(model, update, out / "checkpoint")
    ff.export(model, out / "exported")
    (out / "pretrained").mkdir(exist_ok=True)
    dist.barrier()
    model.save_pretrained(out / "pretrained")
    return outcome, model.num_parameters(only_trainable=True)


def load_on_rank(layout: str, checkpoint: Path) -> dict[str, Any]:
    """Into a new adapter, under another layout."""
    lora = ff.Lora(rank=3, alpha=7, targets=("q_proj", "o_proj", "down_proj"), rslora=True)
    model = ff.parallelize(build("llama"), layout, adapter=lora)
    update = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    assert not any(np.any(values) for name, values in as_numpy(ff.gather(model)).items() if "lora_B" in name)
    ff.load(model, update, checkpoint)
    return as_numpy(ff.gather(model))
