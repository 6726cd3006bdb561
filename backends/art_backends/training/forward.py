"""Logprobs of a pack under a causal language model, with gradient.

The transformer body runs once over the pack, the output matrix only where a token was sampled (``head``). A tree pack
is attended tile by tile (``attention``); by a model whose attention function cannot be replaced, under an ancestor
mask of the whole pack. At load the model is measured, not believed: if neither gives the plain logprobs on a small
probe, or the configuration says that positions or attention depend on the length (sliding windows, dynamic RoPE),
plain padded rows are used, and ``plain_reason`` says why.

It refuses to approximate: what the tree cannot express is computed without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from art_backends.training import attention, head, lora
from art_backends.training.packing import Pack
from art_backends.training.sequences import Ints

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # mean |difference| of the probe's logprobs
_PROBE_TILE = 8  # tokens: the probe has several tiles
_UNABLE = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, AttributeError, KeyError)

log = logging.getLogger(__name__)


class Forward:
    """Computes packs with one (PEFT-wrapped) model: fuses its LoRA layers and replaces its attention, if it can.

    ``tiled`` says whether it could; ``tile`` is the size of the tiles in tokens. ``plain_reason`` is None when trees
    can be used, else why not. ``single_rows`` is true when even padded rows may not stand beside each other, because
    positions depend on the longest one.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        self.device = device
        self.dtype = dtype
        self._causal = model.get_base_model()
        lora.fuse(model)
        self._config = self._causal.config
        text = self._config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        kinds = {item.get("rope_type") for item in (rope, *rope.values()) if isinstance(item, dict)}
        self.single_rows = bool(kinds & _LENGTH_DEPENDENT_ROPE)
        self._window = _sliding_window(text)
        self._plain_head = self._has_plain_head()
        self.tiled = False
        self.tile = _PROBE_TILE
        self.plain_reason = self._why_plain(kinds)
        self.tile = attention.TILE
        if self.plain_reason is not None:
            log.warning("training computes plain padded sequences instead of prefix trees: %s", self.plain_reason)

    def trees_fit(self, longest: int) -> bool:
        """Whether tree packs give this model's own logprobs for sequences of at most ``longest`` tokens."""
        return self.plain_reason is None and (self._window is None or longest <= self._window)

    def logprobs(self, pack: Pack) -> Tensor:
        """Log-probability of each query's token, [Q] float32; with gradient if gradients are enabled."""
        ids = self._put(pack.input_ids)
        positions = self._put(pack.position_ids)
        how = self._tiles(pack) if self.tiled and pack.parents is not None else {"attention_mask": self._mask(pack)}
        at = self._put(pack.query_at)
        tokens = self._put(pack.query_token)
        scale = torch.from_numpy(1.0 / pack.query_temperature).to(torch.float32).to(self.device)
        with self._cast():
            if self._plain_head:
                output = self._causal.base_model(input_ids=ids, position_ids=positions, use_cache=False, **how)
                hidden = output.last_hidden_state.flatten(0, 1)[at]
                matrix = self._causal.get_output_embeddings()
                with torch.autocast(self.device.type, enabled=False):
                    return head.logprobs(hidden.to(matrix.weight.dtype), matrix, tokens, scale)
            output = self._causal(input_ids=ids, position_ids=positions, use_cache=False, **how)
            logits = output.logits.flatten(0, 1)[at]
            scaled = torch.log_softmax(logits.float() * scale[:, None], dim=-1)
            return scaled.gather(1, tokens[:, None]).squeeze(1)

    def _tiles(self, pack: Pack) -> dict[str, Any]:
        assert pack.parents is not None
        plan = attention.tiles(pack.parents, self.device, self.tile)
        return {"attention_mask": plan.placeholder, attention.NAME: plan}

    def _mask(self, pack: Pack) -> Tensor:
        if pack.parents is not None:
            mask = torch.from_numpy(pack.ancestors())[None, None].to(self.device)
            if self._config.get_text_config()._attn_implementation == "eager":  # adds its mask instead
                lowest = torch.finfo(self.dtype).min
                return torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill(~mask, lowest)
            return mask
        columns = np.arange(pack.input_ids.shape[1])[None, :] < pack.lengths[:, None]
        return torch.from_numpy(columns.astype(np.int64)).to(self.device)

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @contextmanager
    def _cast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            yield

    # ---- measuring the model

    def _has_plain_head(self) -> bool:
        """Whether logits are exactly the output matrix times the body's last hidden state."""
        matrix = self._causal.get_output_embeddings()
        if type(matrix) is not nn.Linear or self._causal.base_model is self._causal:
            return False
        ids = torch.arange(1, 6, device=self.device)[None] % matrix.weight.shape[0]
        with torch.no_grad():
            hidden = self._causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self._causal(input_ids=ids, use_cache=False).logits
            if hidden.shape[-1] != matrix.weight.shape[1]:
                return False
            mine = matrix(hidden)
            return mine.shape == logits.shape and torch.allclose(mine.float(), logits.float(), rtol=1e-3, atol=1e-3)

    def _why_plain(self, rope_kinds: set[Any]) -> str | None:
        if rope_kinds & _LENGTH_DEPENDENT_ROPE:
            kind = sorted(rope_kinds & _LENGTH_DEPENDENT_ROPE)[0]
            return f"the model's RoPE is {kind}: positions depend on the length"
        if bool(getattr(self._causal, "_is_stateful", False)):
            return "the model is recurrent"
        try:
            tree, plain = _probe(int(self._config.get_text_config().vocab_size))
            with torch.no_grad():
                expected = self.logprobs(plain)
                if self._tiled_fits(tree, plain, expected):
                    return None
                difference = float((self.logprobs(tree) - expected).abs().mean())
        except _UNABLE as error:
            return f"the model does not take an ancestor mask ({type(error).__name__}: {error})"
        limit = _TOLERANCE.get(self.dtype, 1e-3)
        if not difference <= limit:
            return f"the tree's logprobs differ from plain ones by {difference:.2g} on a probe (allowed {limit:g})"
        return None

    def _tiled_fits(self, tree: Pack, plain: Pack, expected: Tensor) -> bool:
        """Replace the attention function, if both packs then give what was expected of plain rows; else put it back."""
        usual = self._config._attn_implementation
        try:
            self._causal.set_attn_implementation(attention.NAME)
            self.tiled = self._config.get_text_config()._attn_implementation == attention.NAME
            if self.tiled:
                worst = max(float((self.logprobs(pack) - expected).abs().mean()) for pack in (tree, plain))
                if worst <= _TOLERANCE.get(self.dtype, 1e-3):
                    return True
                reason = f"logprobs differ by {worst:.2g}"
            else:
                reason = "its attention function cannot be replaced"
        except _UNABLE as error:
            reason = f"{type(error).__name__}: {error}"
        log.info("prefix trees are computed under a mask of the whole pack, which is slower: %s", reason)
        self.tiled = False
        self._causal.set_attn_implementation(usual)
        return False


def _probe(size: int) -> tuple[Pack, Pack]:
    """A small tree of ids below ``size`` and its two plain rows, asking for the same logprobs."""
    spread = (np.arange(20, dtype=np.int64) * 7919 + 1) % size
    prefix, first, second = spread[:6], spread[6:13], spread[13:]
    ids = np.concatenate([prefix, first, second])
    depth = np.concatenate([np.arange(13), np.arange(6, 13)]).astype(np.int64)
    parents = np.arange(-1, 19, dtype=np.int64)
    parents[13] = 5
    at, token = parents[6:], ids[6:]
    tree = _probe_pack(ids[None], depth[None], parents, at, token)
    rows = np.stack([np.concatenate([prefix, first]), np.concatenate([prefix, second])])
    flat = np.concatenate([np.arange(5, 12), np.arange(13 + 5, 13 + 12)]).astype(np.int64)
    return tree, _probe_pack(rows, np.broadcast_to(np.arange(13), (2, 13)).copy(), None, flat, token)


def _probe_pack(ids: Ints, positions: Ints, parents: Ints | None, at: Ints, tokens: Ints) -> Pack:
    return Pack(
        input_ids=ids,
        position_ids=positions.astype(np.int64),
        parents=parents,
        lengths=np.full(len(ids), ids.shape[1], dtype=np.int64),
        tokens=ids.size,
        query_at=at,
        query_token=tokens,
        query_temperature=np.ones(len(at)),
        occurrence_query=np.zeros(0, dtype=np.int64),
        occurrence_sample=np.zeros(0, dtype=np.int64),
        occurrence_logprob=np.zeros(0),
        samples=(),
    )


def _sliding_window(config: Any) -> int | None:
    """Tokens that the model's narrowest attention window holds, or None if it has none."""
    kinds = getattr(config, "layer_types", None)
    local = any("sliding" in kind or "chunked" in kind for kind in kinds) if kinds else True
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return int(window) if local and window and getattr(config, "use_sliding_window", True) else None
