"""Reader of formulas as plain text: their value on tensors, with implied products and operators over tokens.

A fraction or a number multiplies what follows it; sum_t, mean_t reach to the next + or -, log to the end of one factor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from funrl.algos.plain_text import plain

NAMES = (  # symbols that look like calls
    (r"pi_(\w+)\(t\)", r"pi_\1"),
    (r"\bpi\(t\)", "pi"),
    (r"\bH\(pi_t\)", "H"),
    (r"KL_(\w+\+?)\((\w+) \|\| (\w+)\)", r"KL_\1(\2, \3)"),
    (r"\|(\w)\|", r"abs(\1)"),
    (r"\|o_i\|", "length"),
    (r"mean_\(j in G, j != i\)\(x_j\)", "others"),
    (r"max_\(j in G, j != i\)\(x_j\)", "best_other"),
    (r"sum_v pi_old\(v\)\^2", "sum_squares"),
)
TOKENS = re.compile(r"\s*(\d+\.?\d*|<=|>=|[A-Za-z]\w*(?:\.\d+)?\+?(?=\()|\w+|[-+*/^(),<>=\[\]])")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sigma": torch.sigmoid,
    "sign": torch.sign,
    "abs": torch.abs,
    "sg": lambda x: x,
    "min": lambda x, y: torch.minimum(*torch.broadcast_tensors(number(x), number(y))),
    "max": lambda x, y: torch.maximum(*torch.broadcast_tensors(number(x), number(y))),
    "clip": lambda x, low, high: torch.minimum(torch.maximum(x, number(low)), number(high)),
    "sum_t": lambda x: x.sum(-1, keepdim=True),
    "mean_t": lambda x: x.mean(-1, keepdim=True),
    "KL_k1": lambda p, q: p.log() - q.log(),
    "KL_k2": lambda p, q: (q.log() - p.log()) ** 2 / 2,
    "KL_k3": lambda p, q: q / p - 1 - (q.log() - p.log()),
    "KL_abs": lambda p, q: (q.log() - p.log()).abs(),
}
FUNCTIONS |= {f"{name}+": of for name, of in FUNCTIONS.items() if name.startswith("KL_")}
REACHING = ("sum_t", "mean_t")
ENDS = (None, "+", "-", ")", "]", ",", "<", ">", "<=", ">=", "=", "where", "and", "or", "else")


def number(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def value(latex: str, definitions: Sequence[str], symbols: Mapping[str, Any], functions: Mapping[str, Any] = {}) -> Any:
    """The number that a formula has, given its definitions and what the other symbols stand for.

    Args:
      symbols: name -> tensor; `X_w` is X under the symbols of `symbols["w"]`, and likewise `X_l`.
    """
    meant = dict(definition.split(" = ", 1) for definition in map(plain, definitions) if " = " in definition)
    return Reader(plain(latex), meant, symbols, {**FUNCTIONS, **functions}).read()


class Reader:
    def __init__(self, text: str, meant: Mapping[str, str], symbols: Mapping[str, Any], functions: Mapping[str, Any]):
        for pattern, name in NAMES:
            text = re.sub(pattern, name, text)
        self.text, self.place = text, 0
        self.tokens = TOKENS.findall(text)
        assert "".join(self.tokens) == re.sub(r"\s", "", text), text
        self.meant, self.symbols, self.functions = meant, symbols, functions

    @property
    def next(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self, *expected: str) -> str:
        token = self.next
        assert token is not None and (not expected or token in expected), (self.text, token, expected)
        self.place += 1
        return token

    def read(self) -> Any:
        found = self.cases()
        assert self.next is None, (self.text, self.next)
        return found

    def cases(self) -> Any:
        first = self.either()
        if self.next != "where":
            return first
        choices = []
        while True:
            self.take("where")
            choices.append((self.either(), first))
            self.take(",")
            if self.next == "else":
                break
            first = self.either()
        self.take("else")
        chosen = self.either()
        for condition, one in reversed(choices):
            chosen = torch.where(condition, *(x if torch.is_tensor(x) else number(x) for x in (one, chosen)))
        return chosen

    def either(self) -> Any:
        return self.joined("or", lambda: self.joined("and", self.comparison, torch.logical_and), torch.logical_or)

    def joined(self, word: str, part: Callable[[], Any], join: Callable[..., Any]) -> Any:
        found = part()
        while self.next == word:
            self.take(word)
            found = join(found, part())
        return found

    def comparison(self) -> Any:
        left, held = self.sum(), None
        compare = {"<": torch.lt, ">": torch.gt, "<=": torch.le, ">=": torch.ge, "=": torch.eq}
        while self.next in compare:
            operator, right = compare[self.take()], self.sum()
            holds = operator(number(left), number(right))
            held, left = holds if held is None else held & holds, right
        return left if held is None else held

    def sum(self) -> Any:
        found = -self.product() if self.next == "-" and self.take("-") else self.product()
        while self.next in ("+", "-"):
            found = found + self.product() if self.take() == "+" else found - self.product()
        return found

    def product(self) -> Any:
        found = self.factor()
        while self.next not in ENDS:
            if self.next == "/":
                self.take("/")
                found = found / self.factor()
            else:
                if self.next == "*":
                    self.take("*")
                found = found * self.factor()
        return found

    def factor(self) -> Any:
        base = self.primary()
        if self.next == "^":
            self.take("^")
            return base ** (-self.primary() if self.next == "-" and self.take("-") else self.primary())
        return base

    def primary(self) -> Any:
        token = self.take()
        if token == "(":
            inside = self.cases()
            self.take(")")
            return inside
        if token == "1" and self.next == "[":
            self.take("[")
            condition = self.cases()
            self.take("]")
            return condition.to(torch.float64)
        if re.match(r"\d", token):
            return number(float(token))
        if token in self.functions:
            return self.call(token)
        return self.symbol(token)

    def call(self, name: str) -> Any:
        if self.next != "(":
            return self.functions[name](self.product() if name in REACHING else self.factor())
        self.take("(")
        given = [self.either()]
        while self.next == ",":
            self.take(",")
            given.append(self.either())
        self.take(")")
        return self.functions[name](*given)

    def symbol(self, name: str) -> Any:
        whole, _, side = name.rpartition("_")
        if name in self.symbols:
            return self.symbols[name]
        if name in self.meant:
            return Reader(self.meant[name], self.meant, self.symbols, self.functions).read()
        assert side in ("w", "l") and side in self.symbols, (self.text, name)
        within = {**self.symbols[side], "w": self.symbols["w"], "l": self.symbols["l"]}
        return Reader(whole, self.meant, within, self.functions).read()


assert math.isclose(value(r"-\frac{1}{2} 4 + 2^{-1}", (), {}), -1.5)
