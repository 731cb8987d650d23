"""A decoder and its training step as one writes them in JAX and optax: what lowered programs are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

THETA = 10_000.0
EPS = 1e-6


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight


def rotate(x_THN: jax.Array, positions_T: jax.Array) -> jax.Array:
    half = x_THN.shape[-1] // 2
    angle_T1N = (positions_T[:, None] * THETA ** (-jnp.arange(half) / half))[:, None]
    cos, sin = jnp.cos(angle_T1N), jnp.sin(angle_T1N)
    first, second = x_THN[..., :half], x_THN[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_THN.dtype)


def layer(x_TD: jax.Array, weights: Any, positions_T: jax.Array, seen_TS: jax.Array) -> jax.Array:
    attn, mlp = weights["attn"], weights["mlp"]
    h_TD = norm(x_TD, weights["attn_norm"])
    q, k, v = (jnp.einsum("td,hnd->thn", h_TD, attn[name]) for name in ("q", "k", "v"))
    groups = q.shape[1] // k.shape[1]
    q, k = rotate(q, positions_T), rotate(k, positions_T)
    k, v = jnp.repeat(k, groups, 1), jnp.repeat(v, groups, 1)
    logits_HTS = jnp.einsum("thn,shn->hts", q, k) * q.shape[-1] ** -0.5
    weights_HTS = jax.nn.softmax(jnp.where(seen_TS, logits_HTS, -jnp.inf), -1)
    x_TD = x_TD + jnp.einsum("hts,shn,dhn->td", weights_HTS, v, attn["o"])
    h_TD = norm(x_TD, weights["mlp_norm"])
    gated_TF = jax.nn.silu(h_TD @ mlp["gate"].T) * (h_TD @ mlp["up"].T)
    return x_TD + gated_TF @ mlp["down"].T


def loss(params: Any, fields: dict[str, jax.Array]) -> jax.Array:
    """Mean log-probability of the tokens of one packed row; those without a token before them count 0."""
    tokens_T, positions_T, segments_T = (fields[name][0] for name in ("tokens", "positions", "segments"))
    order_T = jnp.arange(len(tokens_T))
    seen_TS = (segments_T[:, None] == segments_T) & (order_T[:, None] >= order_T)

    def turn(x_TD: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return layer(x_TD, weights, positions_T, seen_TS), None

    x_TD, _ = jax.lax.scan(turn, params["embed"][tokens_T], params["layers"])
    logits_TV = norm(x_TD, params["norm"])[:-1] @ params["unembed"].T
    logp_T = jnp.take_along_axis(jax.nn.log_softmax(logits_TV), tokens_T[1:, None], 1)[:, 0]
    return jnp.where(segments_T[1:] == segments_T[:-1], logp_T, 0).sum() / len(tokens_T)


def stacked(params: Any) -> Any:
    """The weights with those of all layers in one array each, as a loop over layers takes them."""
    return {**params, "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])}


def training_step(rate: float) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any, jax.Array]]]:
    """`init(params)`, and the compiled step (params, state, fields) -> (params, state, loss)."""
    optimizer = optax.adamw(rate, weight_decay=0.0)

    def step(params: Any, state: Any, fields: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, fields)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init, jax.jit(step)
