"""The conversation behind one key: every exchange is a turn of the policy, with the tokens that it sampled.

A client sends whole histories. The longest prefix of a history that ends with a reply of this session continues that
reply's trajectory, token for token; only what follows it is rendered. A history whose replies were changed begins a
trajectory of its own, and is counted as a fork.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from funrl.data.pictures import inner_pictures, stored_pixels
from funrl.data.processors.form import PictureForm
from funrl.environments.calls import call
from funrl.environments.chat import continued_text
from funrl.environments.forms.response_templates import END_THINK, THINK
from funrl.rollout.episodes import Message, Node, Reply, Status, Trajectory
from funrl.rollout.policy import Chat, LimitReached
from funrl.rollout.requests import LogitsError
from funrl.rollout.resident import tokens_heard
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve.asks import Ask, BadRequest
from funrl.serve.pictures import seen_messages

ESCAPE = 6  # bytes of JSON for a byte of text, as in "\\u0061"
MANY = 16  # bytes a token, more than any text has
PART_CHARACTERS = 1 << 16  # characters that are tokenised together to count them
BESIDE_TEXT = 1 << 20  # bytes of a body that are no text of the prompt


def request_digest(path: str, body: bytes) -> bytes:
    """Digest by which a request is found that a client library sends once more."""
    digest = hashlib.blake2b(path.encode() + b"\n", digest_size=16)
    digest.update(body)
    return digest.digest()


class History:
    """Digests of the begins of a request's history, which texts around replies and ids of calls do not change."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self._digest = hashlib.blake2b(digest_size=16)

    def read(self) -> list[bytes]:
        """The digest after each message."""
        self._digest = hashlib.blake2b(json.dumps(self.ask.tools, sort_keys=True).encode(), digest_size=16)
        return [_add(self._digest, message) for message in self.ask.messages]

    def after(self, reply: Message) -> bytes:
        """The digest after a reply to what was read."""
        return _add(self._digest.copy(), reply)


def _add(digest: Any, message: Message) -> bytes:
    """Add a message to a digest; returns its value."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    facts = [message.get("role"), str(message.get("content") or "").strip()]
    facts += [[call["name"], call["arguments"]] for call in calls]
    digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
    return digest.digest()


def rendered_texts(ask: Ask) -> list[str]:
    """The texts that a template renders of a request: without thoughts of earlier turns, which templates leave out."""
    texts = [ask.text, json.dumps(ask.tools)] if ask.tools else [ask.text]
    for message in ask.messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
        thinks = message.get("role") == "assistant"
        texts += [part.rpartition(END_THINK)[2] if thinks else part for part in parts]
    return texts


class PromptBound(NamedTuple):
    """Bound on a prompt, by which one that cannot fit is refused before it is read, or tokenised.

    Attributes:
      length: tokens that prompt and reply may have; 0: no limit.
      longest: bytes of the longest token; 0: unknown.
      sees: whether prompts may have pictures.
    """

    length: int
    longest: int
    sees: bool

    def check_body(self, size: int) -> None:
        """Raise LimitReached where a body has more bytes than JSON can need for the text of a prompt."""
        most = ESCAPE * self.length * self.longest + BESIDE_TEXT
        if self.length and self.longest and not self.sees and size > most:
            raise self._beyond(f"the body has {size} bytes")

    def check(self, ask: Ask, encode: Callable[[str], list[int]]) -> None:
        """Raise LimitReached where the texts of a request cannot fit: by their bytes, or by the tokens of their parts.

        Parts are tokenised until they have too many tokens, where a text could fit by its bytes only just.

        Args:
          encode: text -> token ids.
        """
        self.check_tokens(len(ask.tokens))
        if not self.length or ask.size <= self.length * min(MANY, self.longest or MANY):
            return
        texts = rendered_texts(ask)
        size = sum(len(x) if x.isascii() else len(x.encode("utf-8", "surrogatepass")) for x in texts)
        if self.longest and size > self.length * self.longest:
            raise self._beyond(f"the texts have {size} bytes")
        if size <= MANY * self.length:
            return
        count = 0
        for text in texts:
            for begin in range(0, len(text), PART_CHARACTERS):
                count += len(encode(text[begin : begin + PART_CHARACTERS]))
                if count > 2 * self.length:  # where a text is cut it may have a token more
                    raise self._beyond(f"the texts have more than {count} tokens")

    def check_tokens(self, count: int) -> None:
        """Raise LimitReached where a prompt leaves no room for a reply."""
        if 0 < self.length <= count:
            raise self._beyond(f"the prompt has {count} tokens")

    def _beyond(self, what: str) -> LimitReached:
        return LimitReached("tokens", f"{what}: too many for the limit of {self.length} tokens of prompt and reply")


_T = TypeVar("_T")
ASIDE_BYTES = 1 << 15  # bytes of a request; smaller ones take milliseconds


class RequestThread:
    """Runs functions of large requests in a thread, one after another; those of others at once.

    >>> aside = RequestThread()
    >>> asyncio.run(aside.run(10, len, "abc"))
    3
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size: int, function: Callable[..., _T], *args: object) -> _T:
        """Call a function.

        Args:
          size: bytes of the request.
        """
        if size < ASIDE_BYTES:
            return function(*args)
        async with self._turn:
            return await call(function, *args)


class _PythonDecoder(json.JSONDecoder):
    """A decoder that lets other threads run between two values: that of C holds them up for the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = py_make_scanner(self)


def decode_json(body: bytes) -> Any:
    """The value of a body. Raises: ValueError, RecursionError, it is no JSON."""
    if len(body) < ASIDE_BYTES:
        return json.loads(body)
    return _PythonDecoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))


KEPT_PICTURE_BYTES = 1 << 30  # of pictures in the exchanges that a server of a model remembers
UNSAMPLED = (
    "the model's logits are not finite for this request, so no reply can be sampled: its weights are damaged, or the "
    "numbers of this prompt overflow in its dtype"
)
THOUGHTS = ("reasoning_content", "thinking")  # names of the field of thoughts in a message that was read
DecodeIds = Callable[[list[int]], str]
# (index of the reply, its token ids so far)
Hear = Callable[[int, list[int]], None]


class Sampler(Protocol):
    """The part of a policy that a session needs; see `funrl.rollout.policy.Policy`."""

    @property
    def sampling(self) -> Sampling: ...

    def start(self, content: Any, tools: Any = (), agent: str = "policy") -> Trajectory: ...
    def extend(self, trajectory: Trajectory, content: Any) -> Trajectory: ...
    async def sample(
        self,
        trajectory: Trajectory,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        opening: int = 0,
    ) -> tuple[Reply, Trajectory]: ...


class Speech(NamedTuple):
    """Reading and writing of text.

    Attributes:
      chat: renders messages and reads replies.
      decode: token ids -> text.
      encode: text -> token ids.
      thinks: whether the policy may think before it replies.
      call_opening: name of a function, or None for any -> the text that a call of it begins with; None: the form of
        calls is unknown, so that no call can be demanded.
      form: in which the policy takes pictures; None: it sees none.
      longest: bytes of its longest token; 0: unknown.
    """

    chat: Chat
    decode: DecodeIds
    encode: Callable[[str], list[int]]
    call_opening: Callable[[str | None], str] | None = None
    thinks: bool = False
    form: PictureForm | None = None
    longest: int = 0


class ReplyCall(NamedTuple):
    """A call of a function, with the id that the client gives back."""

    number: str
    name: str
    arguments: Mapping[str, Any]


class Exchange(NamedTuple):
    """A reply as clients get it.

    Attributes:
      content: its text, without calls and without a stop text.
      thoughts: what the policy thought, where that is apart from the content.
      calls: of functions.
      finish: "stop", "length", or "calls".
      stop: the stop text that ended it; None: none did.
      prompt: token ids before it.
      tokens: of the reply.
      logp: [N] nats, under the distribution that was sampled from.
      version: of the weights that sampled the last token.
    """

    content: str
    calls: Sequence[ReplyCall]
    finish: str
    stop: str | None
    prompt: list[int]
    tokens: list[int]
    logp: Tensor
    version: int
    thoughts: str = ""


class Session:
    """The trajectories of one key.

    Attributes:
      forks: histories whose replies were changed, so that they began a trajectory of their own.
      bound: on its prompts.
      limit: of the episode that a request would have passed; None: none.
    """

    def __init__(
        self,
        policy_for: Callable[[Ask], Sampler],
        speech: Speech,
        *,
        agent: str = "policy",
        kept: int | None = None,
        length: int = 0,
    ):
        """Make it.

        Args:
          policy_for: a request -> the policy that samples its replies.
          speech: how it reads and writes text.
          agent: whose trajectories these are.
          kept: exchanges that are remembered, fewer if they have many pictures; None: all, as an episode needs them.
          length: tokens that prompt and reply may have; 0: no limit.
        """
        self.forks = 0
        self.limit: Status | None = None
        self._policy_for = policy_for
        self._speech = speech
        self._agent = agent
        self._aside = RequestThread()
        self.bound = PromptBound(length, speech.longest, speech.form is not None)
        self._kept = kept
        self._by_history: OrderedDict[bytes, Trajectory] = OrderedDict()
        self._by_tokens: OrderedDict[bytes, Trajectory] = OrderedDict()
        self._lengths: set[int] = set()  # of the trajectories by their tokens
        self._sampled: list[Trajectory] = []
        self._answers: OrderedDict[bytes, asyncio.Task[list[Exchange]]] = OrderedDict()

    def trajectories(self) -> list[Trajectory]:
        """Trajectories that end with a reply which no other continues, in the order of their replies.

        None of a session with a bound on what it remembers.
        """
        continued = {id(node) for end in self._sampled for node in end.leaf.path()[:-1]}
        return [end for end in self._sampled if id(end.leaf) not in continued]

    async def answer(self, ask: Ask, digest: bytes, *, again: bool, hear: Hear | None = None) -> list[Exchange]:
        """Sample the replies of a request. They are sampled to their end also where the client goes away.

        Args:
          digest: of the request.
          again: a client library sends the request once more; the first answer is given, not another one.
          hear: receives the tokens of a reply while they are sampled.

        Raises:
          BadRequest: it cannot be served.
        """
        earlier = self._answers.get(digest) if again else None
        if earlier is None or (earlier.done() and (earlier.cancelled() or earlier.exception() is not None)):
            earlier = asyncio.create_task(self._answer(ask, hear))
            earlier.add_done_callback(functools.partial(self._forget_failed, digest))
            self._answers[digest] = earlier
            _bound(self._answers, self._kept)
        return await asyncio.shield(earlier)

    def _forget_failed(self, digest: bytes, answer: asyncio.Task[list[Exchange]]) -> None:
        """Forget an answer that failed: its traceback would keep the body of the request."""
        failed = answer.cancelled() or answer.exception() is not None
        if failed and self._answers.get(digest) is answer:
            del self._answers[digest]

    async def close(self) -> None:
        """Cancel what is being sampled."""
        tasks = [task for task in self._answers.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_body(self, size: int) -> None:
        """Raise BadRequest where no prompt can have as many bytes."""
        try:
            self.bound.check_body(size)
        except LimitReached as limit:
            self.limit = limit.status
            raise _beyond(limit) from limit

    def waits(self, ask: Ask) -> bool:
        """True if what of a reply is its content is known at its end only."""
        calls = bool(ask.tools) and ask.tool_choice != "none"
        if calls and self._speech.call_opening is None:
            return True
        return self._speech.thinks and (calls or ask.reasoning is not None)

    async def count(self, ask: Ask) -> int:
        """Tokens of a request's prompt. Raises: BadRequest, it cannot be served."""
        try:
            policy = self._policy_for(ask)
            return sum(len(node.tokens) for node in (await self._begin(policy, ask, History(ask))).nodes())
        except LimitReached as limit:
            raise _beyond(limit) from limit
        except ValueError as error:
            raise _refused(error) from error

    async def _answer(self, ask: Ask, hear: Hear | None) -> list[Exchange]:
        try:
            policy = self._policy_for(ask)
            if others := set(ask.stop_tokens) - set(policy.sampling.stop):
                raise BadRequest(
                    f"stop_token_ids has {sorted(others)[0]}, which is no stop token of the model: "
                    f"{list(policy.sampling.stop)}",
                    "stop_token_ids",
                )
            history = History(ask)
            trajectory = await self._begin(policy, ask, history)
            forced = self._forced(ask)
            start = policy.extend(trajectory, forced) if forced else trajectory
            sample = functools.partial(policy.sample, start, ask.max_tokens, ask.stop, opening=len(forced))
            replies = (_reply(sample, ask, number, hear) for number in range(ask.count))
            sampled = await asyncio.gather(*replies)
        except LimitReached as limit:
            self.limit = limit.status
            raise _beyond(limit) from limit
        except LogitsError as error:
            raise BadRequest(UNSAMPLED, status=500, code="server_error") from error
        except ValueError as error:
            raise _refused(error) from error
        exchanges = []
        for reply, end in sampled:
            exchange = self._exchange(ask, reply, end, forced)
            if self._kept is None:
                self._sampled.append(end)
            self._remember(history, exchange, end)
            exchanges.append(exchange)
        return exchanges

    async def _begin(self, policy: Sampler, ask: Ask, history: History) -> Trajectory:
        """The trajectory that a request continues.

        Raises:
          LimitReached: it has more tokens than the policy takes, or texts that cannot have fewer.
        """
        beside = functools.partial(self._aside.run, ask.size)
        await beside(self.bound.check, ask, self._speech.encode)
        trajectory = await self._begun(policy, ask, history, beside)
        count = sum(len(node.tokens) for node in trajectory.nodes())
        self.bound.check_tokens(count)
        return trajectory

    async def _begun(
        self, policy: Sampler, ask: Ask, history: History, beside: Callable[..., Awaitable[Any]]
    ) -> Trajectory:
        if ask.tokens or ask.text:
            tokens = ask.tokens or await beside(self._speech.encode, ask.text)
            return await beside(self._begin_tokens, policy, list(tokens))
        histories = await beside(history.read)
        replied = [n for n, message in enumerate(ask.messages) if message.get("role") == "assistant"]
        for place in reversed(replied):
            known = self._by_history.get(histories[place])
            rest = ask.messages[place + 1 :]
            if known is not None and rest:
                self.forks += place != replied[-1]
                return await beside(policy.extend, known, await seen_messages(rest, self._speech.form))
        self.forks += bool(replied)
        messages = await seen_messages(ask.messages, self._speech.form)
        return await beside(policy.start, messages, ask.tools, self._agent)

    def _begin_tokens(self, policy: Sampler, tokens: list[int]) -> Trajectory:
        """The trajectory of a prompt of token ids: the longest one that it begins with, and the rest."""
        ids = np.asarray(tokens, dtype="<i8")
        digest = hashlib.blake2b(digest_size=16)
        longest = hashed = 0
        begun: Trajectory | None = None
        for length in sorted(self._lengths):
            if length >= len(ids):
                break
            digest.update(ids[hashed:length].tobytes())
            hashed = length
            known = self._by_tokens.get(digest.copy().digest())
            if known is not None:
                begun = known
                longest = length
        if begun is None:
            return policy.start(tokens, (), self._agent)
        return policy.extend(begun, tokens[longest:])

    def _forced(self, ask: Ask) -> list[int]:
        """The first tokens of a call that the client demands."""
        if ask.tool_choice in ("auto", "none"):
            return []
        opening = self._speech.call_opening
        if opening is None:
            raise BadRequest(
                f"tool_choice {ask.tool_choice!r} is not served: calls of this model's template are not known to begin "
                "with a fixed text; use 'auto'",
                "tool_choice",
            )
        return self._speech.encode(opening(None if ask.tool_choice == "required" else ask.tool_choice))

    def _exchange(self, ask: Ask, reply: Reply, end: Trajectory, forced: list[int]) -> Exchange:
        node = end.leaf
        numbers = node.numbers
        prompt = [token for earlier in node.path()[:-1] for token in earlier.tokens]
        tokens = list(node.tokens)
        written = tokens[:-1] if node.finish == "stop" else tokens
        before = prompt[: len(prompt) - len(forced)]
        text = continued_text(before, [*forced, *written], self._speech.decode)
        stop = next((stop for stop in ask.stop if stop in text), None) if node.finish == "string" else None
        if stop is not None:
            text = text[: text.index(stop)]
        calls: Sequence[ReplyCall] = ()
        content = text
        thoughts = ""
        if ask.tools and ask.tool_choice != "none" and stop is None:
            functions = reply.tool_calls if ask.parallel else reply.tool_calls[:1]
            calls = [ReplyCall(_number(end, n), name, given) for n, (name, given) in enumerate(functions)]
            if not reply.problems:
                content = str(reply.message.get("content") or "")
                thoughts = _thoughts_of(reply.message)
        elif ask.reasoning is not None:
            thoughts, content = _split_thoughts(reply.message, text)
        finish = "length" if node.finish == "length" else "calls" if calls else "stop"
        return Exchange(
            content,
            calls,
            finish,
            stop,
            prompt=prompt,
            tokens=tokens,
            logp=numbers.sampling_logp,
            version=int(numbers.versions[-1]),
            thoughts="" if ask.reasoning is False else thoughts,
        )

    def _remember(self, history: History, exchange: Exchange, end: Trajectory) -> None:
        if not any(node.owned for node in end.nodes()):  # the ids of pictures do not tell these apart
            ids = np.asarray([*exchange.prompt, *exchange.tokens], dtype="<i8")
            self._by_tokens[hashlib.blake2b(ids.tobytes(), digest_size=16).digest()] = end
            self._lengths.add(len(ids))
            _bound(self._by_tokens, self._kept)
        if history.ask.messages:
            functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in exchange.calls]
            reply = {"role": "assistant", "content": exchange.content, "tool_calls": functions}
            self._by_history[history.after(reply)] = end
            _bound(self._by_history, self._kept)
            if self._kept is not None and any(node.owned for node in end.nodes()):
                _bound_pictures(self._by_history, KEPT_PICTURE_BYTES)


def _beyond(limit: LimitReached) -> BadRequest:
    return BadRequest(str(limit), code="context_length_exceeded")


def _refused(error: ValueError) -> BadRequest:
    return error if isinstance(error, BadRequest) else BadRequest(str(error))


async def _reply(
    sample: Callable[..., Awaitable[tuple[Reply, Trajectory]]], ask: Ask, number: int, hear: Hear | None
) -> tuple[Reply, Trajectory]:
    listener = None if hear is None else lambda ids: hear(number, ids)
    with tokens_heard(listener):
        return await sample(seed=None if ask.seed is None else ask.seed + number)


def _thoughts_of(message: Message) -> str:
    return next((str(message[name]) for name in THOUGHTS if message.get(name)), "")


def _split_thoughts(message: Message, text: str) -> tuple[str, str]:
    """Thoughts and content of a reply without calls: as it was read, else by the marks in its text."""
    if thoughts := _thoughts_of(message):
        return thoughts, str(message.get("content") or "")
    before, mark, after = text.rpartition(END_THINK)
    if mark:
        return before.split(THINK)[-1].strip("\n"), after.lstrip("\n")
    opening, mark, after = text.partition(THINK)
    return (after.strip("\n"), "") if mark and not opening.strip() else ("", text)


def _number(end: Trajectory, index: int) -> str:
    """An id of a call that is the same whenever the same reply is sampled."""
    text = f"{index} {end.token_ids()}".encode()
    return "call_" + hashlib.blake2b(text, digest_size=12).hexdigest()


def _bound(kept: OrderedDict[bytes, Any], most: int | None) -> None:
    while most is not None and len(kept) > most:
        kept.popitem(last=False)


def _bound_pictures(kept: OrderedDict[bytes, Trajectory], most: int) -> None:
    """Forget the oldest trajectories where pictures of all take more than `most` bytes; the last one stays."""
    seen: set[Node] = set()
    total = 0
    for number, end in enumerate(reversed(kept.values())):
        new = [node for node in end.nodes() if node not in seen]
        seen.update(new)
        total += sum(map(_picture_bytes, new))
        if total > most and number:
            _bound(kept, number)
            return


def _picture_bytes(node: Node) -> int:
    """Bytes of the pictures of a node: decoded, three a pixel, and as the model sees them."""
    if node.owned is None:
        return 0
    decoded = sum(3 * stored_pixels(picture) for picture in inner_pictures([*node.messages]))
    return decoded + sum(x.nbytes for x in node.owned.values.values())


def replies_again(headers: Mapping[str, str]) -> bool:
    """True if a client library says that it sends a request once more."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


def choices_of(sampling: Mapping[str, Any], base: Any) -> Any:
    """The sampling parameters of a request: those of the server with the client's choices. Raises BadRequest."""
    try:
        return dataclasses.replace(base, **sampling)
    except ValueError as error:
        raise BadRequest(str(error)) from error
