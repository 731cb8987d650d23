"""First-order linear recurrences over time, without a loop over time."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_linear_scan(x_BT: Tensor, decay_BT: Tensor) -> Tensor:
    """The recurrence from the right, y[t] = x[t] + decay[t] y[t + 1], with y[T] = 0.

    Neighbours are combined in pairs, the recurrence of the pairs is solved recursively, and the odd positions are
    filled in from its solution: about 3 T multiplications in log2(T) steps. Sums of returns, generalised advantage
    estimation and "the next value that counts" (decay 0 or 1) are all this recurrence.

    Args:
      x_BT: what is added at each position, any floating dtype, any number of leading dimensions.
      decay_BT: what carries over from the right, of the same shape. The last column has no influence.
    Returns: y [B, T]. Differentiable.

    Example:
      >>> reverse_linear_scan(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.5, 0.5]])).tolist()
      [[3.0, 4.0, 4.0]]
    """
    T = x_BT.shape[-1]
    if T <= 1:
        return x_BT
    x_even = x_BT[..., 0::2]
    decay_even = decay_BT[..., 0::2]
    x_odd = x_BT[..., 1::2]
    decay_odd = decay_BT[..., 1::2]
    if T % 2:
        x_odd, decay_odd = (torch.nn.functional.pad(z, (0, 1)) for z in (x_odd, decay_odd))
    even = reverse_linear_scan(torch.addcmul(x_even, decay_even, x_odd), decay_even * decay_odd)
    after = torch.nn.functional.pad(even[..., 1:], (0, 1))
    odd = torch.addcmul(x_odd, decay_odd, after)
    return torch.stack((even, odd), dim=-1).flatten(-2)[..., :T]
