"""Requests and completions: what goes into an engine and what comes out."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Literal, NamedTuple, overload

from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.kinds import OwnedLines
from funrl.models.model import ModelConfig
from funrl.rollout.sampling import request_seed
from funrl.rollout.sampling_parameters import Sampling


class Request(NamedTuple):
    """A prompt to complete once.

    Attributes:
      number: identifies the request and its completion; unique among the unfinished requests.
      prompt: token ids, at least one.
      sampling: sampling parameters; `samples` is ignored, as a request is one completion.
      seed: of the request's own random stream, a signed 64-bit number. A completion depends on prompt, sampling, seed
        and weights only: not on other unfinished requests, nor on when or where it is sampled.
      begun: what has been written already, in an earlier step or by an engine that was stopped; the completion
        continues it, and `max_new_tokens` includes it.
      most: bound on the tokens sampled now; None: as many as `max_new_tokens` allows. A completion that reaches it
        has the finish "paused".
      computed: first tokens of the prompt whose keys and values an earlier request has computed: those of its prompt
        and completion but the last token. A native engine finds all of them again, also those in no whole page, and
        counts what it has to compute again.
      adapter: name of the adapter that completes it, as `NativeEngine.load_adapter` was given it; None: the base does.
      model: name of the frozen model that completes it, where an engine has several; "": the policy.
      owned: values that the prompt owns, such as pictures; None: it is tokens.
    """

    number: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    begun: Completion | None = None
    most: int | None = None
    computed: int = 0
    adapter: str | None = None
    model: str = ""
    owned: OwnedLines | None = None


class LogitsError(FloatingPointError):
    """Logits of some sequences are not finite. The engine has ended these, and can continue with the others.

    Attributes:
      numbers: of their requests.
    """

    def __init__(self, message: str, numbers: Sequence[int] = ()):
        super().__init__(message)
        self.numbers = numbers


def logits_error(failed: Sequence[tuple[int, int]]) -> LogitsError:
    """The error of some sequences: (number of the request, index of the token in its completion) of each."""
    number, index = failed[0]
    return LogitsError(
        f"the model's logits are not finite at token {index} of completion {number}: its weights are damaged, or it "
        "has diverged, which a lower --lr may prevent",
        [number for number, _ in failed],
    )


Finish = Literal["stop", "string", "length", "paused", "cancelled"]


class Completion(NamedTuple):
    """Tokens that an engine has sampled after a prompt, on the host.

    Attributes:
      number: of the request.
      tokens: [T] int64; a stop token that was sampled is part of it.
      sampling_logp: [T] nats, under the distribution that was sampled from (tempered, truncated); raw for greedy.
      raw_logp: [T] nats, under the model's own distribution (temperature 1, not truncated).
      versions: [T] int64, version of the weights that sampled each token; of the adapter, where the request names one.
      finish: "stop", by a stop token; "string", by a stop string; "length", by `max_new_tokens`; "paused", by
        `Request.most`; "cancelled".
      routes: [P + T - 1, choices] int16, experts of the tokens of prompt and completion except the last, which was
        never fed back; -1: unknown. None: they are not recorded.
      recomputed: tokens before or in it that were computed again, as in `EngineCost.recomputed`.
      kept: int32 ids that could be sampled at each token; none at tokens without truncation. None: not recorded.
      digests: [T] int64, digest of the weights that sampled each token, of `load_digest`. None: not recorded.
    """

    number: int
    tokens: Tensor
    sampling_logp: Tensor
    raw_logp: Tensor
    versions: Tensor
    finish: Finish
    routes: Tensor | None = None
    recomputed: int = 0
    kept: KeptTokens | None = None
    digests: Tensor | None = None

    @property
    def finished(self) -> bool:
        """True if the model ended it, not a limit."""
        return self.finish in ("stop", "string")

    @property
    def written(self) -> list[int]:
        """Token ids without the stop token that ended it."""
        ids = self.tokens.tolist()
        return ids[:-1] if self.finish == "stop" else ids


def requests_of(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first_prompt: int = 0
) -> list[Request]:
    """`sampling.samples` requests of each prompt; request r is sample `r % samples` of prompt `r // samples`.

    Args:
      prompts: token ids.
      seed: fixes the noise of a step.
      first_prompt: number of `prompts[0]` among all prompts of the step. Noise belongs to the number of the prompt, so
        ranks that share the prompts of a step sample what one rank would.
    """
    samples = sampling.samples
    first = first_prompt * sampling.samples
    numbers = range(first, first + len(prompts) * samples)
    return [Request(n, prompts[(n - first) // samples], sampling, seed=request_seed(seed, n)) for n in numbers]


class RequestGroups(Sequence[list[Request]]):
    """The requests of each prompt, created on access: a replica creates only its own.

    Args:
      prompts: token ids of each.
      sampling: of the completions.
      seed: of their noise.
      owned: values that each prompt owns; (): none does.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        *,
        owned: Sequence[OwnedLines | None] = (),
    ):
        self.prompts = prompts
        self.owned = owned
        self.sampling = sampling
        self.seed = seed

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> list[Request]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Request]]: ...
    def __getitem__(self, index: int | slice) -> list[Request] | list[list[Request]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sampling = self.sampling
        prompt = self.prompts[index]
        numbers = range(index * sampling.samples, (index + 1) * sampling.samples)
        seeds = [request_seed(self.seed, n) for n in numbers]
        rows = zip(numbers, seeds, strict=True)
        owned = self.owned[index] if self.owned else None
        owned = None if owned is None or owned.empty else owned
        return [Request(n, prompt, sampling, seed=seed, owned=owned) for n, seed in rows]


def check_requests(
    config: ModelConfig, requests: Iterable[Request], taken: Container[int] = (), adapters: Collection[str] = ()
) -> None:
    """Raise ValueError where a request cannot be completed by a model of these sizes.

    Args:
      taken: numbers of unfinished requests.
      adapters: names of the engine's adapters.
    """
    seen: set[int] = set()
    for number, prompt, sampling, seed, begun, most, _, adapter, *_ in requests:
        if number in seen or number in taken:
            raise ValueError(f"request {number} is in use already; give each request a number of its own")
        seen.add(number)
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty; a completion needs at least one token before it, such as bos")
        if len(prompt) + sampling.max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens={sampling.max_new_tokens} that is more "
                f"than the model's {config.max_positions} positions"
            )
        written = () if begun is None else begun.tokens.tolist()
        for what, ids in (("prompt", prompt), ("what is begun of request", written)):
            if len(ids) and (min(ids) < 0 or max(ids) >= config.vocab):
                wrong = next(t for t in ids if not 0 <= t < config.vocab)
                raise ValueError(f"{what} {number} has token {wrong}; the vocabulary has {config.vocab}")
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"request {number} has seed {seed}, it must be a signed number of 64 bits")
        wrong = [t for t in sampling.stop if not 0 <= t < config.vocab]
        if wrong:
            raise ValueError(f"stop has token {wrong[0]}; the vocabulary has {config.vocab}")
        if adapter is not None and adapter not in adapters:
            known = f"it has {', '.join(map(repr, sorted(adapters)))}" if adapters else "it has none"
            raise ValueError(
                f"request {number} names the adapter {adapter!r}, which this engine lacks: {known}; load_adapter gives "
                "a native engine one"
            )
        if most is not None and most < 1:
            raise ValueError(f"request {number} has most={most}, it must be at least 1")
        if begun is not None and len(written) >= sampling.max_new_tokens:
            raise ValueError(
                f"request {number} has {len(written)} tokens already, max_new_tokens={sampling.max_new_tokens}"
            )
