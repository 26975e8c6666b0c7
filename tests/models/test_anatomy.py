"""The parts of the models."""

from transformers import GPT2Config

from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of


def test_parts(make_config):
    anatomy = anatomy_of(build_meta(make_config()))
    assert (anatomy.base, anatomy.embedding, anatomy.head) == ("model", "model.embed_tokens", "lm_head")
    assert anatomy.layers == tuple(f"model.layers.{i}" for i in range(3))
    assert anatomy.tied == make_config().tie_word_embeddings


def test_parts_of_other_names():
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    drops = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    anatomy = anatomy_of(build_meta(GPT2Config(**sizes, **drops)))
    assert anatomy.layers == ("transformer.h.0", "transformer.h.1")
    assert (anatomy.embedding, anatomy.head, anatomy.tied) == ("transformer.wte", "lm_head", True)
