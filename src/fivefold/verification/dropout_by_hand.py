"""Dropout of the unmodified model, element by element in Python's and numpy's integers: the reference for
`parallel/dropout/`.

`F.dropout` and `Tensor.uniform_` are replaced while the model trains. The site of a call follows from the running
module: an `nn.Dropout`, a linear whose adapter's input is dropped, an attention whose probabilities [1, H, T, T] are
dropped, or a module that calls these functions itself. A hook adds NEFTune's noise to the embeddings.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.hf_internals import linear_dims

U32 = np.uint32


class Draws:
    """Masks of `model` in training. `row` and `start` are those of the current document, `step` that of the batch."""

    def __init__(self, model: Any, seed: int, neftune: float | None = None) -> None:
        self.row = self.start = self.step = 0
        self._model, self._seed = model, seed
        self._running: list[tuple[str, nn.Module]] = []
        self._calls: dict[str, int] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._running.append((name, module)))
            module.register_forward_hook(lambda *_: self._running.pop() and None)
            if neftune and module is model.get_input_embeddings():
                module.register_forward_hook(partial(self._add_noise, f"{name}/embedding0", neftune))

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Let the model drop in this context, in the batch of `step`."""
        self.step = step
        self._model.train()
        try:
            with patch.object(F, "dropout", self._dropout), patch.object(Tensor, "uniform_", self._uniform()):
                yield
        finally:
            self._model.eval()

    def begin(self, row: int, start: int) -> None:
        """Begin a document."""
        self.row, self.start, self._calls = row, start, {}

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if x.ndim == 4 and x.shape[-1] == x.shape[-2]:
            name = next(name for name, module in reversed(self._running) if not isinstance(module, nn.Dropout))
            bits = self._of_attention(f"{name}/attention0", *x.shape[1:3])
        else:
            bits = self._of_features(self.site(*self._running[-1]), x.numel() // x.shape[-1], x.shape[-1])
        kept = torch.from_numpy(bits >> U32(1) >= round(p * 2**31)).view(x.shape).to(x.device)
        return torch.where(kept, x / (1 - p), torch.zeros_like(x))

    def _add_noise(self, site: str, alpha: float, module: nn.Module, _: Any, x: Tensor) -> Tensor:
        """NEFTune (arXiv:2310.05914), of one document."""
        if not module.training:
            return x
        bits = self._of_features(site, x.numel() // x.shape[-1], x.shape[-1])
        noise = (bits / 2.0**31 - 1) * alpha / np.sqrt(x.numel())
        return x + torch.from_numpy(noise).view(x.shape).to(x)

    def _uniform(self) -> Callable[..., Tensor]:
        """A method that fills a tensor: of hidden states by numbers, another one by PyTorch."""
        hidden, plain = self._model.config.get_text_config().hidden_size, Tensor.uniform_

        def fill(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
            if x.shape[-1] != hidden:
                return plain(x, low, high)
            site = self._numbered(self._running[-1][0], "noise")
            bits = self._of_features(site, x.numel() // x.shape[-1], x.shape[-1])
            drawn = low + (high - low) * (bits / 2.0**32)
            return x.copy_(torch.from_numpy(drawn).view(x.shape))

        return fill

    def site(self, name: str, module: nn.Module) -> str:
        """Name of the site of this call in a running module."""
        kind = "module" if isinstance(module, nn.Dropout) else "call" if linear_dims(module) is None else "branch"
        return self._numbered(name, kind)

    def _numbered(self, name: str, kind: str) -> str:
        number = self._calls.get(f"{name}/{kind}", 0)
        self._calls[f"{name}/{kind}"] = number + 1
        return f"{name}/{kind}{number}"

    def _of_features(self, site: str, tokens: int, features: int) -> np.ndarray:
        of_token = _odd(self._tokens(tokens) ^ _key(self._seed, site))
        of_feature = _odd(np.arange(features, dtype=U32) * U32(0x9E3779B9) ^ _key(self._seed, site, "features"))
        return _unsigned(of_token[:, None] * of_feature)

    def _of_attention(self, site: str, heads: int, tokens: int) -> np.ndarray:
        hashes, key = self._tokens(tokens), _key(self._seed, site)
        of_head = _odd(np.arange(heads, dtype=U32) * U32(0x9E3779B9) ^ _key(self._seed, site, "features"))
        of_query, of_key = _odd(hashes ^ key), _odd(_mixed(hashes ^ ~key)[None] ^ of_head[:, None])
        return _unsigned(of_query[None, :, None] * of_key[:, None, :])

    def _tokens(self, tokens: int) -> np.ndarray:
        of_row = _mixed(np.array([self.row], U32) * U32(0x9E3779B9) ^ _key(self._seed, self.step))
        return _mixed(of_row + np.arange(self.start, self.start + tokens, dtype=U32) * U32(0x9E3779B9))


def _key(*parts: Any) -> np.uint32:
    return U32(int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big"))


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> U32(16))) * U32(0x21F0AAAD)
    bits = (bits ^ (bits >> U32(15))) * U32(0xD35A2D97)
    found: np.ndarray = bits ^ (bits >> U32(15))
    return found


def _odd(bits: np.ndarray) -> np.ndarray:
    return _mixed(bits) | U32(1)


def _unsigned(bits: np.ndarray) -> np.ndarray:
    """The order of signed numbers, from 0."""
    turned: np.ndarray = bits ^ U32(2**31)
    return turned
