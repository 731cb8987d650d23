"""Remarks on the records of a file that a user should know of before a run: fields that nothing reads, equal pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from funrl.data.json_lines import DataError
from funrl.data.messages import are_usual, check_chat_roles, known_fields, unread_fields

TEXT_COLUMNS = ("prompt", "messages", "completion", "chosen", "rejected", "reference")


class RecordRemarks:
    """Oddities of some records, with the number of the first of each kind.

    Example:
      remarks = RecordRemarks(tokenizer)
      for number, record in enumerate(records):
          remarks.see(number, record)
      lines = remarks.lines(lambda number: f"record {number + 1}")
    """

    def __init__(self, tokenizer: Any):
        self.template = getattr(tokenizer, "chat_template", None)
        self.begin = getattr(tokenizer, "bos_token", None)
        self.known = known_fields(self.template)  # and further names that have been looked at
        self.unread: dict[str, int] = {}
        self.begun: list[int] = []
        self.equal: list[int] = []
        self.pairs = 0

    def see(self, number: int, record: Mapping[str, object], usual: bool = False) -> None:
        """Look at a record.

        Args:
          number: of the record.
          record: as of `normal_record`.
          usual: whether all messages are known to be; see `are_usual`.

        Raises:
          DataError: a role that nothing knows.
        """
        for name in () if usual else TEXT_COLUMNS:
            value: Any = record.get(name)
            if type(value) is list and value and not are_usual(value):
                check_chat_roles(value, self.template)
                new = {x for message in value for x in message if x not in self.known and message[x] is not None}
                for field in unread_fields([dict.fromkeys(sorted(new))], self.template):
                    self.unread.setdefault(field, number)
                self.known |= new
        text = record.get("prompt", record.get("text"))
        if self.begin and isinstance(text, str) and text.startswith(self.begin):
            self.begun.append(number)
        if "chosen" in record:
            self.pairs += 1
            if record["chosen"] == record["rejected"]:
                self.equal.append(number)

    def lines(self, where: Callable[[int], str]) -> list[str]:
        """A line for each kind.

        Args:
          where: number of a record -> its file and line.

        Raises:
          DataError: all pairs are equal.
        """
        lines = [f"messages have a field {x!r}, which nothing reads ({where(n)})" for x, n in self.unread.items()]
        if self.begun:
            lines.append(
                f"{len(self.begun)} texts begin with {self.begin!r}, as rendered chats do; they get no "
                f"second one (the first: {where(self.begun[0])})"
            )
        if self.equal and len(self.equal) == self.pairs:
            raise DataError(f"{where(0)}: in all pairs 'chosen' and 'rejected' are equal: there is nothing to learn")
        if self.equal:
            lines.append(
                f"in {len(self.equal)} of {self.pairs} pairs 'chosen' and 'rejected' are equal: they train nothing "
                f"(the first: {where(self.equal[0])})"
            )
        return lines
